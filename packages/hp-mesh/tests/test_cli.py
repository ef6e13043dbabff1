"""The commands answer what the Python calls answer."""

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, RankLayout, Topology
from hp_mesh.cli import main
from hp_mesh.cli._answers import ends, rank_list
from hp_mesh.cli._main import COMMANDS
from hp_mesh.cli._plans import constructor_line, word_line
from hp_mesh.planner import MODELS

from .strategies import dims, divisors

TraceFunction = Callable[[FrameType, str, Any], Any]
MODEL = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 1000}


def run(*argv: str) -> tuple[int, str, str]:
    """Give the exit code, standard output and standard error of one command."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def document(*argv: str) -> Any:
    code, out, err = run(*argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def words(drawn: ParallelDims) -> Sequence[str]:
    return [*word_line(drawn).split(), "--world", str(drawn.world_size)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


@given(dims())
@settings(deadline=None, max_examples=60)
def test_degrees_survive_being_written_as_words_and_as_python(drawn: ParallelDims) -> None:
    assert ParallelDims.from_dict(document("groups", "tp", *words(drawn))["dims"]) == drawn
    assert eval(constructor_line(drawn)) == drawn


@given(dims(max_world=64), st.data())
@settings(deadline=None, max_examples=40)
def test_groups_are_those_of_the_layout(drawn: ParallelDims, data: st.DataObject) -> None:
    layout = drawn.layout()
    name = data.draw(st.sampled_from(layout.names))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    told = document("groups", name, *words(drawn))
    assert told["groups"] == [list(group) for group in layout.groups(name)]
    assert told["size"] == layout.size(name)
    told = document("groups", name, *words(drawn), "--rank", str(rank))
    assert told["group"] == list(layout.group(name, rank))


@given(dims(max_world=64), st.data())
@settings(deadline=None, max_examples=30)
def test_show_tells_the_coordinates_of_the_layout(drawn: ParallelDims, data: st.DataObject) -> None:
    layout = drawn.layout()
    node = data.draw(st.sampled_from([*divisors(layout.world_size), layout.world_size + 1]))
    told = document("show", *words(drawn), "--ranks-per-node", str(node))
    assert ParallelDims.from_dict(told["dims"]) == drawn
    assert [entry["rank"] for entry in told["ranks"]] == list(range(layout.world_size))
    for entry in told["ranks"]:
        place = layout.coordinates(entry["rank"])
        assert entry["coordinates"] == place | {"ep": layout.coordinate("ep", entry["rank"])}
        assert entry["node"] == entry["rank"] // node
    for name, axis in told["axes"].items():
        crosses = any(len({r // node for r in group}) > 1 for group in layout.groups(name))
        assert axis == {"size": layout.size(name), "crosses_nodes": crosses}


def test_show_names_every_rank_in_plain_text() -> None:
    code, out, _ = run("show", "tp=4", "pp=2", "--world", "16", "--axis", "pp")
    assert code == 0
    assert "pp=2 dp_replicate=1 dp_shard=2 cp=1 tp=4" in out
    layout = ParallelDims(tp=4, pp=2, world_size=16).layout()
    for number, group in enumerate(layout.groups("pp")):
        for rank in group:
            place = layout.coordinates(rank)
            axes = f"{place['pp']}.{place['dp_shard']}.{place['tp']}"
            assert f"{rank} {axes} #{number}" in out
    assert "inside a node" in out
    assert "between nodes" in out


def test_show_leaves_out_the_middle_of_a_large_world_and_says_so() -> None:
    code, out, _ = run("show", "tp=8", "--world", "4096")
    assert code == 0
    assert len(out.splitlines()) < 60
    assert "are left out here; --json has all" in out
    assert "4095 511.7 #511" in out


def test_show_writes_its_picture(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    code, out, err = run("show", "tp=4", "--world", "8", "--svg", str(path), "--json")
    assert code == 0
    assert json.loads(out)["axes"]["tp"]["size"] == 4
    assert str(path) in err
    ElementTree.parse(path)


@pytest.mark.parametrize("node", ["4", "8"])
def test_check_tells_what_the_python_call_finds(model: str, node: str) -> None:
    degrees = ParallelDims(tp=16, cp=2, world_size=64)
    topology = Topology(ranks_per_node=int(node))
    report = degrees.check(MODEL, 1000, 8, causal_balance=True, topology=topology)
    argv = ["check", "tp=16", "cp=2", "--world", "64", "--model", model, "--seq-len", "1000"]
    argv += ["--global-batch", "8", "--causal-balance", "--ranks-per-node", node]
    code, out, err = run(*argv, "--json")
    told = json.loads(out)
    assert (code, err) == (2, "")
    assert not told["ok"]
    assert [v["text"] for v in told["violations"]] == [*map(str, report)]
    assert [v["rule"] for v in told["violations"]] == [v.rule for v in report]
    assert [v["level"] for v in told["violations"]] == [v.level for v in report]
    assert told["skipped"] == [*report.skipped]
    code, plain, _ = run(*argv)
    assert code == 2
    assert all(str(violation) in plain for violation in report)
    assert all(field in plain for field in report.skipped)


def test_check_of_good_degrees_exits_with_0() -> None:
    argv = ["check", "tp=8", "--world", "64", "--model", "llama3-8b", "--seq-len", "8192"]
    code, out, err = run(*argv, "--global-batch", "64")
    assert (code, err) == (0, "")
    assert "no error" in out


def test_check_takes_the_catalogue_s_models() -> None:
    code, out, _ = run("check", "tp=16", "--world", "16", "--model", "llama3-8b")
    report = ParallelDims(tp=16, world_size=16).check(MODELS["llama3-8b"].to_config())
    assert code == 2
    assert report.errors
    assert all(str(violation) in out for violation in report.errors)


def test_nodes_that_the_world_would_not_fill_are_not_assumed() -> None:
    assert run("check", "tp=2", "--world", "12")[0] == 0
    code, out, _ = run("check", "tp=2", "--world", "12", "--ranks-per-node", "8")
    assert code == 2
    assert "ranks_per_node=8 does not divide world_size=12" in out


def test_explain_tells_each_rule_as_the_python_call_does(model: str) -> None:
    degrees = ParallelDims(tp=16, world_size=16)
    rules = degrees.explain(MODEL, 4096, topology=Topology(ranks_per_node=8))
    argv = ["explain", "tp=16", "--model", model, "--seq-len", "4096"]
    code, out, err = run(*argv, "--json")
    assert (code, err) == (2, "")
    told = json.loads(out)
    assert [entry["text"] for entry in told["rules"]] == [rule.text for rule in rules]
    assert [entry["verdict"] for entry in told["rules"]] == [rule.verdict for rule in rules]
    _, plain, _ = run(*argv)
    assert all(rule.text in plain for rule in rules)
    assert {"holds", "error", "skipped"} <= {rule.verdict for rule in rules}


@pytest.mark.parametrize(("degree", "code"), [("tp=8", 0), ("tp=16", 2)])
def test_explain_exits_as_check_does(degree: str, code: int) -> None:
    argv = [degree, "--model", "llama3-8b", "--seq-len", "8192"]
    assert run("explain", *argv)[0] == code
    assert run("check", *argv)[0] == code


@pytest.mark.parametrize("argv", [[], *([command.name] for command in COMMANDS)])
def test_help_tells_the_exit_codes(argv: list[str]) -> None:
    _, out, _ = run(*argv, "--help")
    told = dict(re.findall(r"^  (\d)  (.*)$", out, re.MULTILINE))
    assert told.keys() == {"0", "1", "2"}
    assert "nothing fits" in told["1"]
    assert "bad input" in told["2"]


def test_show_assumes_no_nodes_that_the_world_does_not_fill() -> None:
    told = document("show", "dp_shard=12")
    assert told["ranks_per_node"] is None
    assert {entry["node"] for entry in told["ranks"]} == {None}
    assert {axis["crosses_nodes"] for axis in told["axes"].values()} == {None}
    _, out, _ = run("show", "dp_shard=12")
    assert "12 ranks, nodes not known" in out
    assert "--ranks-per-node" in out
    assert "between nodes" not in out
    assert "inside a node" not in out
    assert all(f"{rank} {rank} #0" in out for rank in range(12))
    _, out, _ = run("show", "dp_shard=12", "--ranks-per-node", "4")
    assert "12 ranks on 3 nodes of 4" in out


def test_groups_leave_out_the_middle_of_many_and_say_so() -> None:
    _, out, _ = run("groups", "tp", "tp=8", "--world", "8192")
    assert "1000 groups left out; --json has all" in out
    assert "8184-8191" in out
    _, out, _ = run("groups", "dp_shard", "tp=8", "--world", "8192")
    assert "8 dp_shard groups of 1024" in out
    assert "0 8 16 24 32 40 48 56 64 ... 8168 8176 8184" in out


def test_groups_tell_whether_they_cross_nodes() -> None:
    argv = ["groups", "tp", "tp=4", "--world", "16", "--ranks-per-node"]
    assert document(*argv, "4")["crosses_nodes"] is False
    assert document(*argv, "2")["crosses_nodes"] is True
    assert "4 tp groups of 4, inside a node" in run(*argv, "4")[1]
    assert "4 tp groups of 4, between nodes" in run(*argv, "2")[1]
    # Usual nodes are not assumed where the ranks would not fill them.
    told = document("groups", "tp", "tp=4", "--world", "12")
    assert (told["ranks_per_node"], told["crosses_nodes"]) == (None, None)
    assert "3 tp groups of 4\n" in run("groups", "tp", "tp=4", "--world", "12")[1]


def test_the_ranks_of_a_large_world_are_listed_only_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []
    coordinates = RankLayout.coordinates

    def count(layout: RankLayout, rank: int, view: str = "base") -> dict[str, int]:
        asked.append(rank)
        return coordinates(layout, rank, view)

    monkeypatch.setattr(RankLayout, "coordinates", count)
    svg = str(tmp_path / "ranks.svg")
    assert run("show", "tp=8", "--world", "131072", "--svg", svg)[0] == 0
    assert len(asked) < 1000
    assert run("show", "tp=8", "--world", "64", "--json")[0] == 0
    assert len({*asked}) >= 64


def lines_of_the_package(call: Callable[[], object]) -> int:
    """Count the lines of the package that a call executes, those of a loop each time."""
    package, counted = main.__module__.partition(".cli")[0], 0

    def line(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal counted
        counted += event == "line"
        return line

    def enter(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        return line if frame.f_globals.get("__name__", "").startswith(package) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("argv", [["show"], ["show", "--svg"], ["explain"], ["groups", "pp"]])
def test_a_world_of_131072_ranks_takes_a_few_lines_for_each_in_any_order(
    argv: list[str], tmp_path: Path
) -> None:
    words = ["tp=8", "pp=4", "dp_replicate=2", "order=tp,dp_shard,pp,cp,dp_replicate"]
    picture = [str(tmp_path / "ranks.svg")] if "--svg" in argv else []
    command = [*argv, *picture, *words, "--world", "131072"]
    codes = []
    counted = lines_of_the_package(lambda: codes.append(run(*command)[0]))
    assert codes == [0]
    assert 1000 < counted < 12 * 131072


def test_the_group_of_one_rank_comes_with_its_place() -> None:
    _, out, _ = run("groups", "tp", "tp=2", "pp=2", "--world", "8", "--rank", "5")
    assert "rank 5 is at pp=1 dp_replicate=0 dp_shard=0 cp=0 tp=1" in out
    assert "its tp group of 2: 4 5" in out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_an_example_that_works(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(command.name, "--help")
    assert (code, err) == (0, "")
    assert f"{command.name} {command.example}" in out
    code, out, err = run(command.name, *command.example.split())
    # A check whose degrees break a rule is an example too.
    assert code in (0, 2)
    assert out
    assert "Traceback" not in err


@given(st.integers(1, 200), st.integers(1, 50))
@settings(deadline=None, max_examples=100)
def test_ends_are_the_first_and_the_last_without_overlap(count: int, most: int) -> None:
    head, tail = ends(count, most)
    both = [*head, *tail]
    assert both == sorted(set(both))
    assert len(both) == min(count, most)
    assert head.start == 0
    assert tail.stop == count


def test_neighbouring_ranks_are_told_as_a_range() -> None:
    assert rank_list((4, 5, 6)) == "4-6"
    assert rank_list((4, 6)) == "4 6"
    assert rank_list((7,)) == "7"
    assert rank_list(range(0, 80, 2), 4) == "0 2 4 ... 78"


def test_a_run_without_sequence_parallelism_may_say_so() -> None:
    argv = ["check", "tp=4", "--seq-len", "61"]
    code, out, _ = run(*argv)
    assert (code, "tp=4 does not divide seq_len=61" in out) == (2, True)
    code, out, _ = run(*argv, "--no-sequence-parallel")
    assert (code, "no error" in out) == (0, True)
    assert "seq_len" in run("explain", *argv[1:])[1]
    assert "seq_len" not in run("explain", *argv[1:], "--no-sequence-parallel")[1]
    code, _, err = run(*argv, "tp5", "--no-sequence-parallel")
    assert (code, "seq_len" in err) == (2, False)
