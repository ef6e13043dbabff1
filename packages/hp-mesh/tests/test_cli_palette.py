"""Colours: one for each name, which people with any colour vision can tell apart."""

from itertools import combinations

import pytest

from hp_mesh.cli._pictures import MEMORY_COLOURS, TIME_COLOURS

# Machado, Oliveira and Fernandes 2009, "A physiologically-based model for simulation of color
# vision deficiency", table 1 at severity 1; on linear RGB.
VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# sRGB to CIE XYZ, each row divided by its white.
XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))
JUST_NOTICED = 2.3  # in CIELAB (Mahy, van Eycken and Oosterlinck 1994)


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    """Give a colour's place in CIELAB for one kind of colour vision."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    light = [
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))))
        for row in VISIONS[vision]
    ]
    ratios = [sum(a * b for a, b in zip(row, light, strict=True)) for row in XYZ]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("colours", [TIME_COLOURS, MEMORY_COLOURS], ids=["time", "memory"])
def test_all_colours_of_a_panel_are_told_apart(vision: str, colours: dict[str, str]) -> None:
    for one, other in combinations(colours.values(), 2):
        places = zip(seen(one, vision), seen(other, vision), strict=True)
        distance = sum((a - b) ** 2 for a, b in places) ** 0.5
        assert distance > 6 * JUST_NOTICED, (one, other)


def test_a_name_has_one_colour_in_both_panels() -> None:
    for name in TIME_COLOURS.keys() & MEMORY_COLOURS.keys():
        assert TIME_COLOURS[name] == MEMORY_COLOURS[name]
