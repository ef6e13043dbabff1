"""Report what padding adds to a gather: exact, ragged, and torch's fully_shard.

Plans only, no ranks: the bytes of one gathered block beyond those of its parameters, in percent.
torch pads every parameter to equal chunks of dim 0. Ragged is shown cut between single elements and
between rows, the last dim of a parameter of more than one.
"""

import argparse
import json
import math
from pathlib import Path

from hp_fsdp.layout import PLANNERS, ShardSpec, direct_bytes_of

Shapes = list[tuple[int, ...]]
BLOCKS: dict[str, Shapes] = {
    "Llama-like block": [
        *[(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)],
        *[(14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)],
    ],
    "32 stacked experts": [(32, 5760, 2880), (32, 5760), (32, 2880, 2880), (32, 2880)],
    "odd shapes": [(300, 257), (257,), (1000, 300), (3, 7), (1,), (50, 1000), (10, 10, 3, 3)],
}
ITEMSIZE = 2


def row(shape: tuple[int, ...]) -> int:
    """Return the elements of one row of dim 0."""
    return math.prod(shape[1:])


def padding(shapes: Shapes, degree: int) -> dict[str, float]:
    """Return each layout's padding in percent of the parameters' bytes."""
    numel = sum(map(math.prod, shapes))
    chunked = sum(-(-shape[0] // degree) * degree * row(shape) for shape in shapes)
    found = {"torch": chunked / numel - 1}
    single = [1] * len(shapes)
    rows = [shape[-1] if len(shape) > 1 else 1 for shape in shapes]
    cases = {"exact": single, "ragged": single, "ragged, rows": rows}
    for name, atoms in cases.items():
        specs = [
            ShardSpec(shape=shape, dim=0, degree=degree, atom=atom)
            for shape, atom in zip(shapes, atoms, strict=True)
        ]
        planner = PLANNERS["exact" if name == "exact" else "ragged"]
        plan = planner(specs, degree, ITEMSIZE, direct_bytes_of("gloo"))
        found[name] = plan.padding_bytes / plan.parameter_bytes
    return {name: 100 * share for name, share in found.items()}


def main() -> None:
    """Print all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two numbers of ranks only")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = []
    for name, shapes in BLOCKS.items():
        for degree in (8, 64) if options.quick else (8, 64, 512, 1024):
            percent = padding(shapes, degree)
            rows.append({"case": f"{name}, {degree} ranks", "padding_percent": percent})
            shown = ", ".join(f"{layout} {value:.2f}%" for layout, value in percent.items())
            print(f"{rows[-1]['case']}: {shown}")
    if options.json:
        options.json.write_text(json.dumps({"name": "fsdp_padding", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
