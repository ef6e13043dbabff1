"""Colours that people with any colour vision can tell apart.

After Okabe and Ito, "Color Universal Design" (2008): the plain colours for bars, and the same mixed
with white as grounds on which dark text stays legible.
"""

INK = "#1a1a1a"
FAINT = "#5f6368"
PAPER = "#ffffff"
EDGE = "#9aa0a6"
GROUND = "#f4f5f7"

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW, BLACK, GREY = "#56b4e9", "#d55e00", "#f0e442", "#222222", "#cccccc"

# By name and not by order of appearance, so that a colour means the same in every picture.
TIME_COLOURS = {
    "compute": BLUE,
    "tp": ORANGE,
    "cp": GREEN,
    "fsdp": PURPLE,
    "dp_replicate": SKY,
    "ep": VERMILION,
    "pp": YELLOW,
    "bubble": GREY,
    "optimizer": BLACK,
}
MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": BLACK,
    "activations": ORANGE,
    "logits": VERMILION,
    "buffers": GREEN,
}
LIMIT = "#b00020"

GROUP_COLOURS = (
    "#a9d3ec",
    "#f7d58c",
    "#9fdcc6",
    "#ecc6da",
    "#d9d9d9",
    "#f2b48c",
    "#faf4a6",
    "#a79ccf",
)
