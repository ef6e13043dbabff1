"""The pages of hp-mesh: outputs of commands, errors, modules, differences from torchtitan."""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_mesh
from hp_mesh import LayoutError, ParallelDims, ParallelDimsError, ParallelMesh
from hp_mesh.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "tools" / "docs" / "pages" / "hp-mesh"
README = (ROOT / "packages" / "hp-mesh" / "README.md").read_text("utf-8")
TEXTS = {path.stem: path.read_text("utf-8") for path in PAGES.glob("*.md")}
SHOWN = re.compile(r"^```sh\nhp-mesh ([^\n]*)\n```\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`hp-mesh (\w+ [^`]*=[^`]*|\w+ --[^`]*)`")
EIGHT: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "world_size": 8}


def shown() -> list[tuple[str, str]]:
    """Return each command of the pages that shows its output, and the output."""
    return [found for name in sorted(TEXTS) for found in SHOWN.findall(TEXTS[name])]


def answer(command: str) -> tuple[int, str]:
    """Return the exit code and the output of one command line."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(command.split())
    return code, out.getvalue()


@pytest.mark.parametrize(("command", "text"), shown(), ids=lambda value: value.split()[0])
def test_the_output_on_a_page_is_the_output_of_its_command(command: str, text: str) -> None:
    code, out = answer(command)
    assert code == 0
    # A line of three dots replaces lines that the page leaves out.
    parts = text.split("\n...\n")
    assert out.startswith(parts[0])
    assert out.endswith(parts[-1])
    assert len(parts) <= 2
    assert len(out.splitlines()) >= sum(len(part.splitlines()) for part in parts)


def test_the_pages_show_the_plan_and_the_ranks() -> None:
    assert {command.split()[0] for command, _ in shown()} == {"show", "plan"}


@pytest.mark.parametrize(
    "command",
    [found for text in TEXTS.values() for found in COMMAND.findall(text) if "=" in found],
)
def test_every_command_on_a_page_is_accepted(command: str) -> None:
    assert answer(command)[0] == 0


def test_the_degree_in_a_comment_is_the_inferred_one() -> None:
    dims = ParallelDims(cp=2, tp=2, ep=4, world_size=16)
    assert f"dp_shard follows: {dims.dp_shard}" in TEXTS["guide"]


def test_the_error_on_the_pages_is_the_one_that_is_raised() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=3, world_size=4)
    assert f"`{caught.value}`" in README
    assert f"`{caught.value}`" in TEXTS["guide"]


def test_the_root_has_12_to_18_names_and_each_of_them_is_there() -> None:
    names = {*hp_mesh.__all__} - {"__version__"}
    assert 12 <= len(names) <= 18
    assert all(hasattr(hp_mesh, name) for name in names)
    public = {name for name in vars(hp_mesh) if not name.startswith("_")}
    modules = {"cli", "planner", "world"}  # loaded by whoever imported them
    assert public - modules - {"TYPE_CHECKING", "import_module"} <= names


def test_every_module_of_the_journey_is_there_and_the_others_are_listed() -> None:
    table = TEXTS["inside"].partition("| module | content |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    there = {path.stem for path in Path(hp_mesh.__file__).parent.iterdir()}
    assert {*listed} == there - {"__init__", "__main__", "__pycache__", "py"}


@contextmanager
def eight_ranks(**degrees: Any) -> Iterator[ParallelMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with ParallelDims(**{**EIGHT, **degrees}).build_mesh("cpu") as mesh:
            yield mesh
    finally:
        dist.destroy_process_group()


def experts_on_too_few_ranks() -> None:
    with pytest.raises(ParallelDimsError, match=r"ep=3 does not divide dp_shard\*cp\*tp"):
        ParallelDims(dp_replicate=2, dp_shard=2, ep=3, world_size=4)


def length_of_uncut_sequences() -> None:
    assert ParallelDims(**EIGHT).seq_len_divisor == 2
    assert ParallelDims(cp=2, tp=4, world_size=16).seq_len_divisor == 16


def all_that_is_wrong() -> None:
    with pytest.raises(ValueError, match="tp=0") as caught:
        ParallelDims(tp=0, dp_shard=0, world_size=1)
    assert isinstance(caught.value, ParallelDimsError)
    assert len(caught.value.violations) == 2


def building_is_a_step() -> None:
    with eight_ranks() as mesh:
        assert mesh["tp"].size() == 2
        assert mesh.get_optional_mesh("pp") is None
    assert not hasattr(ParallelDims, "get_mesh")


def names_of_one_rank() -> None:
    with eight_ranks() as mesh:
        assert {name: mesh[name].size() for name in ("pp", "ep", "efsdp")} == {
            "pp": 1,
            "ep": 1,
            "efsdp": 4,
        }


def meshes_of_several_ranks() -> None:
    (source,) = re.findall(r"`(\{name: mesh\[name\] .*?\})`", TEXTS["coming-from"])
    with eight_ranks() as mesh:
        found = eval(source, {"mesh": mesh})
        assert {"dp_replicate", "fsdp", "tp", "batch", "loss", "efsdp"} <= {*found}
        assert not {"pp", "cp", "ep"} & {*found}


def sizes_by_other_names() -> None:
    dims = ParallelDims(**EIGHT)
    assert dims.non_dp_size == 2
    assert dims.layout().size("loss") > 1
    assert ParallelDims(tp=8, world_size=8).layout().size("loss") == 1


def both_dense_meshes() -> None:
    with eight_ranks() as mesh:
        for axes in (("dp_replicate", "fsdp", "tp"), ("dp_replicate", "dp_shard", "tp")):
            assert mesh[axes].mesh_dim_names == axes


def axes_of_two_views() -> None:
    with eight_ranks() as mesh, pytest.raises(LayoutError, match=r"dp is in .* ep is in"):
        mesh["dp", "ep"]


# By the words with which each row of the table begins.
DIFFERENCES: dict[str, Callable[[], None]] = {
    "`ep=3` on `dp_shard=2`": experts_on_too_few_ranks,
    "`seq_len_divisor`": length_of_uncut_sequences,
    "wrong degrees are": all_that_is_wrong,
    "`get_mesh(name)`": building_is_a_step,
    "`get_mesh` refuses": names_of_one_rank,
    "`get_all_one_dimensional_meshes()`": meshes_of_several_ranks,
    "`non_data_parallel_size`": sizes_by_other_names,
    "dense meshes": both_dense_meshes,
    "`SpmdLayout`": axes_of_two_views,
}


def differences() -> list[str]:
    """Return the first column of the table about torchtitan."""
    _, _, table = TEXTS["coming-from"].partition("| torchtitan | here |\n|---|---|\n")
    table, _, _ = table.partition("\n\n")
    return [row.split("|")[1].strip() for row in table.splitlines()]


@pytest.mark.parametrize("row", differences())
def test_every_difference_from_torchtitan_on_the_page_is_one(row: str) -> None:
    (check,) = [check for begin, check in DIFFERENCES.items() if row.startswith(begin)]
    check()
