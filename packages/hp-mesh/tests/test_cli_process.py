"""The command line as a process: without torch or rich, into a closed pipe, on a terminal."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hp_mesh.cli import main

PACKAGE = main.__module__.partition(".cli")[0]
CHECK = ["check", "tp=8", "--world", "16"]


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def blocked(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command where importing a module fails."""
    lines = [
        "import sys",
        f"sys.modules[{module!r}] = None",
        f"from {PACKAGE}.cli import main",
        "code = main(sys.argv[1:])",
        f"assert sys.modules[{module!r}] is None",
        "raise SystemExit(code)",
    ]
    return python("-c", "\n".join(lines), *argv)


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.cli"])
def test_both_modules_run_the_command(module: str) -> None:
    done = python("-m", module, *CHECK, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["dims"]["dp_shard"] == 2
    done = python("-m", module, "check", "tp=3", "--world", "4")
    assert done.returncode == 2
    assert "tp=3 does not divide world_size=4" in done.stderr
    assert "Traceback" not in done.stderr


PLAN = "plan --model llama3-8b --world 8 --seq-len 8192 --global-batch 16"


@pytest.mark.parametrize("module", ["torch", "matplotlib"])
def test_all_commands_work_without(module: str) -> None:
    for line in (PLAN, " ".join(CHECK), "show tp=8", "explain tp=16", "groups tp tp=8"):
        done = blocked(module, *line.split())
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout


def test_without_rich_one_line_names_the_extra() -> None:
    for line in (PLAN, " ".join(CHECK), "show tp=8", "explain tp=16", "groups tp tp=8"):
        done = blocked("rich", *line.split())
        name = line.split()[0]
        message = f"hp-mesh {name}: tables need rich: pip install 'hp-mesh[cli]'\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_json_and_code_and_exit_codes_need_no_rich() -> None:
    done = blocked("rich", *CHECK, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"]
    done = blocked("rich", "check", "tp=16", "--model", "llama3-8b", "--json")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (2, False)
    done = blocked("rich", *PLAN.split(), "--memory-fraction", "0.01", "--json")
    assert done.returncode == 1
    done = blocked("rich", *PLAN.split(), "--as-code")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ParallelDims(" in done.stdout


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    command = [sys.executable, "-m", PACKAGE, "groups", "tp", "tp=2", "--world", "65536", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_reader_that_goes_away_leaves_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    argv = ["show", "tp=2", "--world", "4096", "--json", "--picture", str(path)]
    command = [sys.executable, "-m", PACKAGE, *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().decode() == f"wrote {path}\n"
        assert process.wait(60) == 141
    assert path.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        ("> /dev/full", "hp-mesh: cannot write the answer: No space left on device\n"),
        (">&-", "hp-mesh: the standard output is closed\n"),
    ],
)
def test_an_answer_that_cannot_be_written_is_one_message(redirected: str, said: str) -> None:
    command = f"{sys.executable} -m {PACKAGE} groups tp tp=2 --world 4 --json {redirected}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, said)


class Screen(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True, which a string's file does not."""
        return True


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)


def on_terminal(*argv: str) -> tuple[int, str]:
    with redirect_stdout(Screen()) as screen:
        code = main(argv)
    return code, screen.getvalue()


@pytest.mark.usefixtures("colours")
def test_a_terminal_gets_colours_and_the_same_numbers() -> None:
    code, shown = on_terminal("show", "tp=4", "pp=2", "--world", "16")
    assert code == 0
    assert "\x1b[" in shown
    assert "----" in shown
    for rank in range(16):
        assert f"{rank} {rank // 8}.{rank // 4 % 2}.{rank % 4} #{rank // 4}" in shown


@pytest.mark.usefixtures("colours")
def test_a_terminal_gets_the_whole_report() -> None:
    code, shown = on_terminal("check", "tp=16", "--world", "16", "--model", "llama3-8b")
    assert code == 2
    assert "tp=16 does not divide num_key_value_heads=8; use 1, 2, 4 or 8" in shown


@pytest.mark.usefixtures("colours")
def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = re.compile(r"\x1b\[[0-9;]*\b[34]\d")
    assert coloured.search(on_terminal("check", "tp=16", "--model", "llama3-8b")[1])
    monkeypatch.setenv("NO_COLOR", "1")
    _, shown = on_terminal("check", "tp=16", "--model", "llama3-8b")
    assert "----" in shown
    assert not coloured.search(shown)


@pytest.mark.usefixtures("colours")
def test_json_on_a_terminal_is_json() -> None:
    code, shown = on_terminal(*CHECK, "--json")
    assert code == 0
    assert json.loads(shown)["ok"]


def test_a_pipe_gets_plain_ascii() -> None:
    for line in (" ".join(CHECK), "show tp=8", "explain tp=16", "groups tp tp=8"):
        done = python("-m", PACKAGE, *line.split())
        assert done.stdout.isascii()


def test_without_matplotlib_a_picture_says_what_to_install() -> None:
    done = blocked("matplotlib", "show", "tp=8", "--picture", "ranks.svg")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pictures need matplotlib: pip install" in done.stderr
