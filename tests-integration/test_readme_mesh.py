"""What the README of hp-mesh shows and claims: its examples' output, its names, its differences."""

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
from hp_mesh import LayoutError, ParallelDims, ParallelDimsError, ParallelMesh, Plan
from hp_mesh.cli import main

README = (Path(__file__).parents[1] / "packages" / "hp-mesh" / "README.md").read_text("utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEXT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`hp-mesh (\w+ [^`]*=[^`]*|\w+ --[^`]*)`")
EIGHT: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "world_size": 8}


def shown() -> list[tuple[str, str]]:
    """Return each output in the README with the command before it."""
    return [
        (COMMAND.findall(README[: found.start()])[-1], found[1]) for found in TEXT.finditer(README)
    ]


def answer(command: str) -> tuple[int, str]:
    """Return the exit code and the output of one command line."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(command.split())
    return code, out.getvalue()


@pytest.mark.parametrize(("command", "text"), shown(), ids=lambda value: value.split()[0])
def test_the_output_in_the_readme_is_that_of_its_command(command: str, text: str) -> None:
    code, out = answer(command)
    assert code == 0
    # A line of three dots stands for those that the README leaves out.
    parts = text.split("\n...\n")
    assert out.startswith(parts[0])
    assert out.endswith(parts[-1])
    assert len(parts) <= 2
    assert len(out.splitlines()) >= sum(len(part.splitlines()) for part in parts)


def test_the_readme_shows_the_plan_and_the_ranks() -> None:
    assert [command.split()[0] for command, _ in shown()] == ["show", "plan"]


@pytest.mark.parametrize(
    "command", [found[1] for found in COMMAND.finditer(README) if "=" in found[1]]
)
def test_every_command_in_the_readme_is_taken(command: str) -> None:
    assert answer(command)[0] == 0


def test_the_python_examples_run() -> None:
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        for source in PYTHON.findall(README):
            exec(source, names)
    assert f"dp_shard follows: {names['dims'].dp_shard}" in README
    assert isinstance(names["found"], Plan)


def test_the_error_in_the_readme_is_the_one_that_is_raised() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=3, world_size=4)
    assert f"`{caught.value}`" in README


def test_the_root_has_12_to_18_names_and_each_of_them_is_there() -> None:
    names = {*hp_mesh.__all__} - {"__version__"}
    assert 12 <= len(names) <= 18
    assert all(hasattr(hp_mesh, name) for name in names)
    public = {name for name in vars(hp_mesh) if not name.startswith("_")}
    modules = {"cli", "planner", "world"}  # loaded by whoever imported them
    assert public - modules - {"TYPE_CHECKING", "import_module"} <= names


def test_every_module_of_the_journey_is_there_and_the_others_are_listed() -> None:
    table = README.partition("| module | what it has |")[2].partition("\n\n")[0]
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
    (source,) = re.findall(r"`(\{name: mesh\[name\] .*?\})`", README)
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
    """Return what the table of the README says of torchtitan."""
    table = README.partition("| torchtitan | here |\n|---|---|\n")[2].partition("\n\n")[0]
    return [row.split("|")[1].strip() for row in table.splitlines()]


@pytest.mark.parametrize("row", differences())
def test_every_difference_from_torchtitan_in_the_readme_is_one(row: str) -> None:
    (check,) = [check for begin, check in DIFFERENCES.items() if row.startswith(begin)]
    check()
