"""The page about checks lists the names of fields that the code reads."""

import re
from pathlib import Path

import pytest

from hp_mesh import ParallelDims
from hp_mesh._model import COUNTS, NESTED, RULED, SIZES
from hp_mesh.planner import ModelShape

# The first parent with the pages: of the repository, or of the folder that vendored tests run in.
PAGES = Path("tools", "docs", "pages", "hp-mesh")
PAGE = next(up / PAGES for up in Path(__file__).parents if (up / PAGES).is_dir()) / "guide-check.md"
SHAPE = {"n_layers": 2, "dim": 8, "n_heads": 4, "ffn": 8, "vocab": 8, "top_k": 1, "expert_ffn": 8}


def rows() -> dict[str, set[str]]:
    """Return the table of field names: what is after the field in each row, in backticks."""
    text = PAGE.read_text(encoding="utf-8").partition("| field | names |")[2]
    table = text.strip().partition("\n\n")[0].splitlines()[1:]
    cells = [line.strip("|").split("|") for line in table]
    return {field.strip(): {*re.findall(r"`(\w+)`", names)} for field, names, *_ in cells}


def test_the_page_lists_every_name_that_the_checks_read() -> None:
    listed = rows()
    assert [n for f, names in RULED.items() for n in names if n not in listed[f]] == []
    text = PAGE.read_text(encoding="utf-8")
    assert [n for names in COUNTS.values() for n in names if f"`{n}`" not in text] == []
    assert [name for name in NESTED if f"`{name}`" not in text] == []


def test_the_drawing_of_views_has_the_axes_and_aliases_of_the_code() -> None:
    text = (PAGE.parent / "views.svg").read_text(encoding="utf-8")
    drawn: dict[str, tuple[str, ...]] = {}
    aliases: set[str] = set()
    for view, row in re.findall(
        r'font-weight="bold"[^>]*>(\w+)</text>(.*?)(?=<text x="0"|$)', text, re.S
    ):
        words = re.findall(r">(= )?([\w, ]+)</text>", row)
        drawn[view] = tuple(name for alias, name in words if not alias)
        aliases |= {name for alias, names in words if alias for name in names.split(", ")}
    layout = ParallelDims(ulysses_degree=1, world_size=1).layout()
    assert drawn == {name: view.axes for name, view in layout.views.items()}
    assert {*layout.names} == aliases | {axis for axes in drawn.values() for axis in axes}


def test_the_page_lists_every_name_that_the_planner_reads() -> None:
    listed = rows()
    missing = {
        field: {*names} - listed.get(field, set())
        for field, names in SIZES.items()
        if not {*names} <= listed.get(field, set())
    }
    assert missing == {}


@pytest.mark.parametrize("field", ["heads", "kv_heads", "ffn", "vocab", "layers", "experts"])
def test_every_name_on_the_page_is_read(field: str) -> None:
    dims = ParallelDims(tp=3, dp_shard=2, pp=5, ep=3)
    for name in rows()[field]:
        checked = any(name in found.values for found in dims.check({name: 4}))
        assert checked or read_by_the_planner(field, name), name


def read_by_the_planner(field: str, name: str) -> bool:
    rest = {key: value for key, value in SHAPE.items() if key not in RULED[field]}
    return bool(getattr(ModelShape.from_config({**rest, name: 4}), field) == 4)
