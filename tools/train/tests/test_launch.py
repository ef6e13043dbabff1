"""The launcher: who is blamed, and that nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.launch import launch

TOOLS = str(Path(__file__).resolve().parents[2])
RANK = "import os, sys, time; rank = int(os.environ['RANK']); "
# A rank that would outlive its launcher, if nothing ended it.
STAY = (
    f"import os, sys, time; sys.path.insert(0, {TOOLS!r}); "
    "from train.launch import watch_parent; watch_parent(); "
    "open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); time.sleep(60)"
)
LAUNCH_STAYING = (
    f"import sys; sys.path.insert(0, {TOOLS!r}); from train.launch import launch; "
    "sys.exit(launch([sys.executable, '-c', sys.argv[1], sys.argv[2]], 3))"
)


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def _alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _wait_for(what: str, condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {seconds} s"
        time.sleep(0.02)


def test_every_rank_gets_its_place_and_the_folder_they_share(tmp_path: Path) -> None:
    program = RANK + (
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'); "
        f"out = open(os.path.join({str(tmp_path)!r}, str(rank)), 'w'); "
        "out.write(' '.join(os.environ[n] for n in names)); "
        "sys.exit(not os.path.isdir(os.environ['TRAIN_RENDEZVOUS']))"
    )
    assert launch(_python(program), 3) == 0
    assert [(tmp_path / str(r)).read_text() for r in range(3)] == [f"{r} {r} 3 3" for r in range(3)]


def test_the_rank_that_failed_first_is_shown_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The cause notes its exception first, which the others wait for, but is the last to be gone.
    program = (
        f"import sys; sys.path.insert(0, {TOOLS!r}); from train.launch import note_failure; "
        f"from pathlib import Path; noted = Path({str(tmp_path / 'noted')!r})\n"
        + RANK
        + "\nwhile rank != 2 and not noted.exists(): time.sleep(0.01)\n"
        + "note_failure(rank); noted.touch(); time.sleep(0.5 * (rank == 2)); "
        + "sys.exit('the cause' if rank == 2 else 'connection closed by peer')"
    )
    assert launch(_python(program), 4) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["rank 2 failed with exit status 1", "the cause"]
    assert sorted(lines[2:]) == [
        f"then rank {r} failed with exit status 1: connection closed by peer" for r in (0, 1, 3)
    ]


def test_equal_messages_of_ranks_are_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(_python(RANK + "time.sleep(0.2 * rank); sys.exit('full')"), 3) == 1
    assert (
        capfd.readouterr().err == "3 ranks failed with the same message and exit status 1\nfull\n"
    )


def test_a_killed_rank_is_the_cause_and_ends_the_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = RANK + "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"
    start = time.monotonic()
    assert launch(_python(program), 3) == 1
    assert time.monotonic() - start < 20
    assert capfd.readouterr().err.startswith("rank 1 was killed by SIGKILL\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    started.mkdir()
    temporary.mkdir()
    launcher = subprocess.Popen(
        [*_python(LAUNCH_STAYING), STAY, str(started)],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        # A shell makes its background jobs, which tests may be in, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    _wait_for("ranks", lambda: len(list(started.iterdir())) == 3)
    assert len(list(temporary.iterdir())) == 1
    pids = [int(path.name) for path in started.iterdir()]
    assert all(_alive(pid) for pid in pids)
    launcher.send_signal(number)
    launcher.communicate(timeout=120)
    _wait_for("end of the ranks", lambda: not any(_alive(pid) for pid in pids))
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert not [*temporary.iterdir()]  # nor does the folder that they shared


def test_what_ranks_refuse_is_one_message_and_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    program = RANK + "time.sleep(0.2 * rank); print('refused', file=sys.stderr); sys.exit(2)"
    assert launch(_python(program), 3) == 2
    assert capfd.readouterr().err == "refused\n"


# A rank that takes its time to save; the second fails at it.
SAVE = """
import os, signal, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
def save(number, frame):
    time.sleep(0.3)
    if rank == sys.argv[2]:
        sys.exit("no space left")
    open(os.path.join(folder, "saved" + rank), "w").close()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
open(os.path.join(folder, rank), "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("failing", ["none", "1"])
@pytest.mark.parametrize("times", [1, 3])
def test_ranks_may_save_when_they_are_asked_to_end(
    tmp_path: Path, failing: str, times: int
) -> None:
    program = (
        f"import sys; sys.path.insert(0, {TOOLS!r}); from train.launch import launch; "
        "sys.exit(launch([sys.executable, '-c', *sys.argv[1:]], 2))"
    )
    launcher = subprocess.Popen(
        [*_python(program), SAVE, str(tmp_path), failing], stderr=subprocess.PIPE, text=True
    )
    _wait_for("ranks", lambda: len(list(tmp_path.iterdir())) == 2)
    for _ in range(times):
        launcher.terminate()
        time.sleep(0.1)
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGTERM
    failed = "rank 1 failed with exit status 1\nno space left\n"
    assert errors == "SIGTERM: ending 2 ranks\n" + (failed if failing == "1" else "")
    saved = {path.name for path in tmp_path.glob("saved*")}
    assert saved == {"saved0", "saved1"} - {f"saved{failing}"}


def test_ranks_that_do_not_save_in_time_are_named_and_the_run_has_failed(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {TOOLS!r}); from train import launch; "
        "launch.SAVE_SECONDS = 0.2; "
        "sys.exit(launch.launch([sys.executable, '-c', *sys.argv[1:]], 2))"
    )
    late = SAVE.replace("time.sleep(0.3)", "time.sleep(60 if rank == '1' else 0)")
    launcher = subprocess.Popen(
        [*_python(program), late, str(tmp_path), "none"], stderr=subprocess.PIPE, text=True
    )
    _wait_for("ranks", lambda: len(list(tmp_path.iterdir())) == 2)
    launcher.terminate()
    _, errors = launcher.communicate(timeout=120)
    assert errors == "SIGTERM: ending 2 ranks\nkilled before they had saved: ranks 1\n"
    assert launcher.returncode == 1


def test_a_rank_that_saved_and_ended_is_no_failure_and_the_others_may_end_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Only one rank was sent SIGTERM: all saved, and the first one still draws the curves.
    program = RANK + (
        f"time.sleep(2.5 * (rank == 0)); open(os.path.join({str(tmp_path)!r}, str(rank)), 'w'); "
        "sys.exit(143)"
    )
    assert launch(_python(program), 3) == 143
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
    assert capfd.readouterr().err == ""


def test_a_failed_rank_is_reported_although_others_saved(capfd: pytest.CaptureFixture[str]) -> None:
    program = RANK + "time.sleep(0.3 * (rank == 0)); sys.exit('full' if rank == 0 else 143)"
    assert launch(_python(program), 2) == 1
    assert capfd.readouterr().err == "rank 0 failed with exit status 1\nfull\n"


# Rank 1 cannot write what it printed; rank 0 goes on until it is told to end.
PRINT_TO_NOBODY = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from train.launch import launch

def program():
    if os.environ["RANK"] == "1":
        print("hello")
        return 0
    time.sleep(0.5)
    with open(os.path.join(sys.argv[2], "found"), "w") as file:
        file.write(str(os.path.isdir(os.environ["TRAIN_RENDEZVOUS"])))
    return 0

sys.stdin.readline()
status = launch(program, 2)
sys.stderr.write(f"the launcher ended with {status}")
sys.stderr.flush()
os._exit(0)
"""


def test_a_forked_rank_that_cannot_write_its_output_fails_alone(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [*_python(PRINT_TO_NOBODY), TOOLS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is printed waits in the rank's memory until its program has returned.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert launcher.stdout is not None
    launcher.stdout.close()
    launcher.stdout = None
    _, errors = launcher.communicate("\n", timeout=120)
    assert errors.startswith("rank 1 failed with exit status 1\n")
    assert "BrokenPipeError" in errors
    assert errors.count("the launcher ended with") == 1
    assert errors.endswith("the launcher ended with 1")
    assert (tmp_path / "found").read_text() == "True"


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("sys.exit('the reason')", 1, "rank 0 failed with exit status 1\nthe reason\n"),
        ("sys.exit(3)", 1, "rank 0 failed with exit status 3\n"),
        ("sys.exit()", 0, ""),
        ("0", 0, ""),
    ],
)
def test_a_forked_rank_ends_as_a_program_does(ends: str, status: int, said: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {TOOLS!r}); from train.launch import launch; "
        f"sys.exit(launch(lambda: {ends}, 1))"
    )
    ended = subprocess.run(_python(program), stderr=subprocess.PIPE, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (status, said)
