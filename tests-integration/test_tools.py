"""The repository's own tools."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
import bench_rows
import checks
import examples
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import vendor
from bench_whole import best_of
from rank_pool import RankError, RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from whole_step.instruments import MOST, WARM_UP, Probe, ReceivedBytes, component_of, timed


def test_vendoring_moves_imports_of_siblings_and_nothing_else() -> None:
    source = (
        '"""from hp_mesh import text stays."""\n'
        "from hp_mesh import A, B\n"
        "if True:\n    from hp_dtensor._layout import (\n        C,\n    )\n"
        "from . import _own\nfrom hp_meshes import D\nimport os\n"
    )
    moved = vendor.rewrite(source, ["hp_mesh", "hp_dtensor"], "foo._vendor")
    assert moved == source.replace(
        "\nfrom hp_mesh import", "\nfrom foo._vendor.hp_mesh import"
    ).replace("from hp_dtensor._layout", "from foo._vendor.hp_dtensor._layout")


def test_vendoring_refuses_what_it_cannot_move() -> None:
    with pytest.raises(vendor.VendorError, match="line 2: 'import hp_mesh' cannot be moved"):
        vendor.rewrite("import os\nimport hp_mesh\n", ["hp_mesh"], "foo")


def test_vendoring_copies_a_package_with_the_siblings_it_declares(tmp_path: Path) -> None:
    vendor.copy(["hp-cp"], tmp_path / "v", "v")
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == [
        "hp_cp",
        "hp_dtensor",
    ]
    for path in (tmp_path / "v").rglob("*.py"):
        assert "\nfrom hp_" not in path.read_text(encoding="utf-8")
    assert (tmp_path / "v" / "hp_cp" / "LICENSE").is_file()


def test_packages_that_share_a_sibling_can_be_vendored_together_and_one_by_one(
    tmp_path: Path,
) -> None:
    vendor.copy(["hp-cp"], tmp_path / "one", "v")
    vendor.copy(["hp-ep"], tmp_path / "one", "v")
    vendor.copy(["hp-cp", "hp-ep"], tmp_path / "both", "v")
    names = [sorted(p.name for p in (tmp_path / folder).iterdir()) for folder in ("one", "both")]
    assert names == [["hp_cp", "hp_dtensor", "hp_ep"]] * 2


def test_a_copy_that_was_changed_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    vendor.copy(["hp-mesh"], tmp_path, "v")
    changed = tmp_path / "hp_mesh" / "__init__.py"
    original = changed.read_text(encoding="utf-8")
    changed.write_text("mine = True\n", encoding="utf-8")
    with pytest.raises(vendor.VendorError, match="there already, and not the same"):
        vendor.copy(["hp-cp", "hp-mesh"], tmp_path, "v")
    assert [path.name for path in tmp_path.iterdir()] == ["hp_mesh"]
    assert changed.read_text(encoding="utf-8") == "mine = True\n"
    vendor.copy(["hp-mesh"], tmp_path, "v", replace=True)
    assert changed.read_text(encoding="utf-8") == original


@pytest.mark.parametrize("namespace", ["a-b", "", "a..b", "a.class"])
def test_a_namespace_that_cannot_be_imported_is_refused(tmp_path: Path, namespace: str) -> None:
    with pytest.raises(vendor.VendorError, match="no dotted import name"):
        vendor.copy(["hp-mesh"], tmp_path / "v", namespace)
    assert not (tmp_path / "v").exists()


def page_of(tmp_path: Path, *parts: str) -> Path:
    """Write a page; fences and what is between them are given."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def fence(language: str, code: str, mark: str = "") -> str:
    """Return a fenced block, below a mark if one is given."""
    return (f"<!-- {mark} -->\n" if mark else "") + f"```{language}\n{code}\n```"


def test_blocks_of_a_page_share_names_and_each_world_of_ranks_has_its_own(tmp_path: Path) -> None:
    on_ranks = (
        "import torch\nimport torch.distributed as dist\n"
        "assert 'x' not in globals()\n"
        "dist.init_process_group('gloo')\n"
        "ranks = torch.ones(1)\ndist.all_reduce(ranks)\n"
        "print(dist.get_rank(), 'of', int(ranks))\ndist.destroy_process_group()"
    )
    page = page_of(
        tmp_path,
        fence("python", "import pickle\nclass A: pass\nx = 1"),
        fence("python", on_ranks, "ranks: 2"),
        fence("text", "1 of 2\n0 of 2"),
        "- a list\n\n  ```python\n  x += 1\n  if x:\n      print(x)\n  ```",
        fence("text", "2"),
        fence(
            "python", "assert pickle.loads(pickle.dumps(A())) and not __import__('os').listdir()"
        ),
        fence("python", "raise ValueError", "not run: it needs a GPU"),
        fence("yaml", "a: 1", "not run: a file"),
        fence("sh", "pip install hp-mesh"),
        fence("sh", "echo one\necho two; echo three; test -e noxfile.py"),
        fence("text", "one\n...\nthree"),
    )
    assert [block.language for block in examples.run(page)] == ["python"] * 4 + ["sh"]


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (fence("python", "x = 1\nassert x == 2"), r"page\.md:4: (.*\n)+.*line 5, in <module>"),
        (fence("python", "f("), r"page\.md:4: (.*\n)+.*line 4"),
        (
            fence("python", "import os\nassert os.environ['RANK'] != '1'", "ranks: 2"),
            r"page\.md:5: this block failed on rank 1:\n(.*\n)+.*line 6",
        ),
        (fence("python", "import os\nos._exit(3)"), r"page\.md:4: (.*\n)*the process died"),
        (fence("sh", "false\necho no"), r"page\.md:4: these commands ended with status 1"),
        (fence("python", "print(1)") + "\n\n" + fence("text", "2"), r"page\.md:4: .*prints:\n1"),
        (fence("python", "x = 5") + "\n\n" + fence("text", "5"), r"page\.md:4: .*prints:"),
        (fence("sh", "pip --version\nfalse"), r"page\.md:4: these commands ended with status 1"),
        (fence("yaml", "a: 1"), r"page\.md:4: a fence of yaml; use python, sh or text"),
        (fence("", "a"), r"page\.md:4: a fence of no language"),
        (fence("python", "x", "not run"), r"page\.md:5: <!-- not run --> is no mark"),
        (fence("python", "x", "ranks: many"), r"page\.md:5: <!-- ranks: many --> is no mark"),
        (fence("sh", "true", "ranks: 2"), r"page\.md:5: .* is for python blocks"),
        ("```python\nx", r"page\.md:3: this fence is not closed"),
        (fence("python", "x = 1", "rnaks: 2"), r"page\.md:5: <!-- rnaks: 2 --> is no mark"),
        ("<!-- result: gpu -->", r"page\.md:3: <!-- result: gpu --> is no mark of the site"),
        ("<!--results: gpu-->", r"page\.md:3: <!--results: gpu--> is no mark of the site"),
        ("<!-- results: a b -->", r"page\.md:3: .* is no mark of the site"),
        ("<!-- results -->x", r"page\.md:3: .* is no mark of the site"),
        ("<!-- changlog: hp-cp -->\n\nText.", r"page\.md:3: .*; use .*'changelog: PACKAGE'"),
        ("<!-- ranks: 2 -->\n\nText.", r"page\.md:3: .* no block is below it"),
    ],
)
def test_a_block_that_fails_or_is_no_example_names_its_line(
    tmp_path: Path, block: str, error: str
) -> None:
    with pytest.raises(examples.ExampleError, match=error):
        examples.run(page_of(tmp_path, block))


OF_RANKS = "import os\nprint('rank', os.environ['RANK'])\nprint('same')"


@pytest.mark.parametrize(
    ("shown", "equal"),
    [
        ("same\nrank 1\nsame\nrank 0", True),
        ("rank 0\n...", True),
        ("...\nrank 1", True),
        ("rank 0\n...\nsame", True),
        ("rank 0\n...\nrank 1\nsame\nsame", True),
        ("rank 0\nrank 1\nsame", False),
        ("rank 2\n...", False),
        ("same\nsame\nsame\n...", False),
    ],
)
def test_lines_of_ranks_are_compared_in_any_order_and_dots_stand_for_the_others(
    tmp_path: Path, shown: str, equal: bool
) -> None:
    page = page_of(tmp_path, fence("python", OF_RANKS, "ranks: 2"), fence("text", shown))
    if equal:
        examples.run(page)
        return
    with pytest.raises(examples.ExampleError, match=r"page\.md:5: the text below"):
        examples.run(page)


def test_marks_of_the_site_are_no_marks_of_blocks(tmp_path: Path) -> None:
    marks = ["<!-- results -->", "<!-- results: gpu -->", "<!-- changelog: hp-cp -->"]
    marks += ["<!-- recipe: dense -->"]
    page = page_of(tmp_path, *marks, fence("python", "x = 1"))
    assert [block.run for block in examples.blocks_of(page)] == [True]


def test_a_block_without_an_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "BLOCK_SECONDS", 1.0)
    with pytest.raises(examples.ExampleError, match=r"page\.md:4: this block ran for more"):
        examples.run(page_of(tmp_path, fence("python", "while True: pass")))
    with pytest.raises(examples.ExampleError, match=r"page\.md:4: these commands ran for more"):
        examples.run(page_of(tmp_path, fence("sh", "sleep 60")))


def test_files_in_a_folder_may_have_no_example_and_a_named_file_must(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = page_of(tmp_path, "No code.")
    assert examples.main([str(tmp_path)], 1) == 0
    assert examples.main([str(page)], 1) == 1
    assert "no block of this file is run" in capfd.readouterr().out


def test_each_benchmark_has_rows_for_the_documentation() -> None:
    assert {bench.label_of(path) for path in bench.chosen([])} == {*bench_rows.CONVERTERS}


def test_ratios_of_the_documentation_are_ours_over_the_peers() -> None:
    row = {"part": "host", "case": "S0 -> R", "torch_us": 30.0, "ours_us": 15.0}
    found = {"rows": [{**row, "ratio": 2.0, "ratio_low": 1.6, "ratio_high": 2.5}]}
    (shown,) = bench.committed("hp-dtensor/redistribute", found)["rows"]
    assert shown == {
        "name": "host, S0 -> R",
        "ours": 15.0,
        "peer": 30.0,
        "unit": "us",
        "against": "torch",
        "ratio": 0.5,
        "low": 0.4,
        "high": 0.625,
    }


def test_quick_figures_are_not_for_the_documentation() -> None:
    command = [sys.executable, "tools/bench.py", "hp-mesh", "--quick", "--commit"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--commit is for full sizes" in result.stderr


def test_whole_steps_of_both_sides_are_measured_and_drawn(tmp_path: Path) -> None:
    found, picture = tmp_path / "whole.json", tmp_path / "whole.svg"
    command = [sys.executable, "tools/bench_whole.py", "--quick", "--ranks", "2"]
    command += ["--only", "Llama, 2 ranks, fsdp=2", "--json", str(found), "--picture", str(picture)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Llama, 2 ranks, fsdp=2: 32 tokens per step" in shown
    result = json.loads(found.read_text(encoding="utf-8"))
    names = [row["name"] for row in bench_rows.rows_of("tools/whole", result)]
    assert [name.rpartition(": ")[2] for name in names] == [
        "step",
        "above compute",
        "host time above compute",
        "bare collectives above compute",
        "compute",
        "rounds left out",
        "tokens/s",
        "peak memory",
        "received",
    ]
    (row,) = result["rows"]
    ours, theirs = (row[side]["received_bytes"] for side in ("hp", "torch"))
    assert ours["all-gather"] == pytest.approx(theirs["all-gather"], rel=0.05)
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


class Loaded(Probe):
    """A probe whose times are given."""

    def __init__(self, loads: Sequence[float]) -> None:
        super().__init__(0)
        self._loads = iter(loads)

    def seconds(self) -> float:
        """Return the next of the given times."""
        return next(self._loads)


class Numbered:
    """An arm that records the numbers of its steps."""

    name = "numbered"

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def step(self, number: int) -> None:
        """Record the number."""
        self.numbers.append(number)
        time.sleep(0.5 * (number == WARM_UP + 1))


def rounds(rank: int, loads: Sequence[float]) -> tuple[list[int], list[float], int]:
    arm: Any = Numbered()
    found = timed([arm], 2, torch.device("cpu"), Loaded(loads))
    return arm.numbers, found.seconds["numbered"], found.discarded


def test_rounds_in_which_the_machine_was_used_are_repeated(
    ranks: Callable[[int], RankPool],
) -> None:
    quiet, disturbed = [1.0] * WARM_UP, 1.5
    (found,) = ranks(1).run(rounds, [*quiet, 1.0, disturbed, 1.1])
    numbers, seconds, discarded = found
    assert numbers == list(range(WARM_UP + 3))
    assert len(seconds) == 2
    assert max(seconds) < 0.5  # the slow step was in the disturbed round
    assert discarded == 1
    (found,) = ranks(1).run(rounds, [*quiet, *[disturbed] * 2 * MOST])
    numbers, seconds, discarded = found
    assert len(numbers) == WARM_UP + 2 * MOST
    assert (len(seconds), discarded) == (2, 2 * MOST - 2)


def test_of_settings_that_are_about_as_fast_the_smallest_is_chosen() -> None:
    peaks = {"large": 9, "small": 5, "slow": 1}
    assert best_of({"large": 100.0, "small": 101.9, "slow": 103.0}, peaks) == "small"
    assert best_of({"large": 100.0, "small": 102.1, "slow": 103.0}, peaks) == "large"


def test_the_readme_has_the_committed_ratios_of_whole_steps() -> None:
    root = Path(__file__).resolve().parents[1]
    found = json.loads((root / "tools/bench_results/whole.json").read_text(encoding="utf-8"))
    ratios = {row["name"]: row["ratio"] for row in found["rows"]}
    cases = [name.removesuffix(": step") for name in ratios if name.endswith(": step")]
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert len(cases) == 7
    for case in cases:
        kinds = ("step", "above compute", "peak memory")
        cells = " | ".join(f"{ratios[f'{case}: {kind}']:.2f}" for kind in kinds)
        assert f"| {case} | {cells} |" in readme


def received_bytes(rank: int) -> dict[str, int]:
    """Run collectives of both of torch's interfaces, and return the bytes that were counted."""
    own = torch.ones(4)
    with ReceivedBytes() as counted:
        dist.all_gather_into_tensor(torch.empty(8), own)
        dist.reduce_scatter_tensor(torch.empty(2), own)
        dist.all_reduce(own)
        splits = [3, 1] if rank == 0 else [1, 3]
        dist.all_to_all_single(torch.empty(4), own, splits, splits)
        mesh = init_device_mesh("cpu", (2,))
        funcol.all_to_all_single(own, splits, splits, mesh).sum()
        distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None).full_tensor()
    return dict(counted.by_kind)


def test_bytes_of_collectives_are_those_from_other_ranks(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(received_bytes):
        assert found == {
            "all-gather": 16 + 8,
            "reduce-scatter": 8,
            "all-reduce": 16,
            "all-to-all": 2 * 4,
        }


@pytest.mark.parametrize(
    ("event", "component"),
    [
        ("wait for all-gathers", "wait for all-gathers"),
        ("wait for reduce-scatters", "wait for reduce-scatters"),
        ("c10d::_allgather_base_", "start of collectives"),
        ("_c10d_functional::wait_tensor", "wait in functional collectives"),
        ("aten::addmm", "products and attention"),
        ("fsdp::split_with_sizes_copy", "copies"),
        ("aten::_fused_adamw_", "AdamW"),
        ("aten::index_put_", "rows of tokens and indices"),
        ("aten::mul", "other operators"),
        ("FSDP::pre_forward (blocks.0)", "host, outside operators"),
        ("autograd::engine::evaluate_function: MmBackward0", "host, outside operators"),
    ],
)
def test_each_event_of_a_profile_belongs_to_a_component(event: str, component: str) -> None:
    assert component_of(event) == component


@pytest.mark.parametrize(("every", "ran"), [(1, "0123456"), (3, "036"), (9, "0")])
def test_every_nth_test_is_run_and_the_others_are_counted(
    tmp_path: Path, every: int, ran: str
) -> None:
    tests = tmp_path / "test_numbers.py"
    tests.write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(7))\ndef test_n(n):\n    print(n)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", f"--every={every}", str(tests)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert re.findall(r"^\.?(\d)$", result.stdout, re.MULTILINE) == list(ran)
    if every > 1:
        assert f"{7 - len(ran)} deselected" in result.stdout


def test_no_test_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "--every=0", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--every 0 runs no test" in result.stderr


def test_fast_leaves_out_cases_on_ranks_but_the_first_and_what_is_slow(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\nboth = pytest.mark.parametrize('n', range(2))\n\n"
        "@both\ndef test_alone(n):\n    print('alone', n)\n\n"
        "@both\ndef test_on(n, ranks):\n    print('on ranks', n)\n\n"
        "@pytest.mark.slow\ndef test_slow():\n    print('slow')\n"
    )
    ini = tmp_path / "pytest.ini"
    ini.write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--fast", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    said = re.findall(r"(alone|on ranks|slow) ?(\d?)$", result.stdout, re.MULTILINE)
    assert said == [("alone", "0"), ("alone", "1"), ("on ranks", "0")]
    assert "3 passed, 2 deselected" in result.stdout


def test_repeated_tests_run_in_rounds_with_fixtures_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef seen():\n    return []\n\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_n(n, seen):\n    seen.append(n)\n    assert seen == [n]\n    print(n)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--repeat=3", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert re.findall(r"^\.?(\d)$", result.stdout, re.MULTILINE) == list("010101")
    assert "6 passed" in result.stdout


def test_jobs_run_side_by_side_and_all_to_their_end(tmp_path: Path) -> None:
    def job(name: str, code: str) -> checks.Job:
        return checks.Job(name, [sys.executable, "-c", f"from pathlib import Path\n{code}"])

    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    meet = "Path({!r}).touch()\nwhile not Path({!r}).exists(): pass\nprint('met', {})"
    jobs = [
        job("first", meet.format(here, there, 1)),
        job("second", meet.format(there, here, 2) + "\nraise SystemExit(3)"),
        job("third", "print('alone')"),
    ]
    ended = {done.name: done for done in checks.run_jobs(jobs, 2)}
    assert [ended[j.name].printed for j in jobs] == ["met 1\n", "met 2\n", "alone\n"]
    assert [ended[j.name].status for j in jobs] == [0, 3, 0]


def test_a_failed_job_is_named_and_fails_the_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def short(name: str) -> checks.Job:
        return checks.Job(name, [sys.executable, "-c", f"raise SystemExit({name!r} == 'b')"])

    monkeypatch.setattr(checks, "nox_job", short)
    assert checks.main(["a"]) == 0
    assert "failed" not in capfd.readouterr().out
    assert checks.main(["a", "b"]) == 1
    last = capfd.readouterr().out.splitlines()[-2:]
    assert sorted((line.split()[0], line.split()[-1]) for line in last) == [
        ("failed", "b"),
        ("passed", "a"),
    ]


def polling_threads(rank: int) -> tuple[int, float]:
    groups = [dist.new_group() for _ in range(3)]
    x = torch.tensor(float(rank))
    for group in groups:
        dist.all_reduce(x, group=group)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop"), x.item()


@pytest.mark.skipif(sys.platform != "linux", reason="reads threads' names from /proc")
def test_groups_of_tests_share_the_one_thread_that_polls(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(polling_threads) == [(1, 4.0)] * 2


def policy(rank: int) -> int:
    return os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of Linux")
def fails(rank: int) -> None:
    raise ArithmeticError(f"on rank {rank}")


def test_an_error_on_a_rank_names_the_line_of_the_test(
    ranks: Callable[[int], RankPool],
) -> None:
    with pytest.raises(RankError, match="on rank 1") as caught:
        ranks(2).run(fails)
    assert f'File "{fails.__code__.co_filename}", line' in str(caught.value)


def test_no_process_of_tests_is_interrupted_by_one_that_wakes_up(
    ranks: Callable[[int], RankPool],
) -> None:
    assert policy(0) == os.SCHED_BATCH
    assert ranks(2).run(policy) == [os.SCHED_BATCH] * 2


def test_torch_has_one_thread_in_the_process_of_tests() -> None:
    assert torch.get_num_threads() == 1


def gathered_whole(rank: int) -> tuple[bool, set[str]]:
    """Return whether `full_tensor` is right, and which c10d calls it starts."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(1)])
    with torch.profiler.profile() as profiler:
        right = torch.equal(sharded.full_tensor(), whole)
    return right, {e.key for e in profiler.key_averages() if e.key.startswith("c10d::")}


def test_torch_on_ranks_of_tests_never_starts_the_gather_that_corrupts_the_heap(
    ranks: Callable[[int], RankPool],
) -> None:
    for right, started in ranks(2).run(gathered_whole):
        assert right
        assert started == {"c10d::_allgather_base_"}
