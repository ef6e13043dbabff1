"""A covering sample of the fault suite (``nox -s faults``), and what one trial says."""

import json
import random
from pathlib import Path

import faults
import pytest
from fault_events import Event


@pytest.mark.timeout(900)
def test_a_sample_of_faults_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert faults.suite(faults.SAMPLE, jobs=2, degrees=["cp"]), capfd.readouterr().out


@pytest.fixture
def trial(tmp_path: Path) -> faults.Trial:
    faults.become_subreaper(tmp_path)  # starts processes that are no trial's
    (tmp_path / "model.json").write_text(json.dumps(faults.MODEL))
    return faults.Trial(tmp_path, tmp_path, random.Random(0))


@pytest.mark.parametrize(
    ("degrees", "phase", "where"),
    [
        ("cp", "update", "over axis 'efsdp' (ranks 0, 1), in step 2, in the update: Timed out"),
        (
            "pp",
            "gradients",
            "in send or receive over axis 'pp' (ranks 0, 1), in step 2: Timed out",
        ),
    ],
)
def test_a_rank_that_stops_is_named_with_collective_axis_and_step(
    trial: faults.Trial, degrees: str, phase: str, where: str
) -> None:
    words = trial.words(degrees, "--comm-timeout", "3", "--steps", "3")
    done = trial.run(words, [Event("stop", 1, 2, phase)])
    assert trial.bad == {}
    assert done.status == 1
    header, message, saved = done.stderr.splitlines()
    assert saved == f"no checkpoint was saved in {trial.folder / 'out'}"
    assert header == "rank 0 failed with exit status 1"
    assert message.startswith("train: error: rank 1 did not answer, stopped or cut off; rank 0 ")
    assert where in message


def test_a_wrong_loss_and_a_hang_are_found(
    trial: faults.Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, loss in (("one", 1.0), ("out", 2.0)):
        (trial.shared / name).mkdir()
        (trial.shared / name / "log.jsonl").write_text(f'{{"step": 1, "loss": {loss}}}\n')
    trial.compare("one")
    assert set(trial.bad) == {"wrong"}
    monkeypatch.setattr(faults, "SECONDS", 0.5)
    trial.run(trial.words("one"))
    assert set(trial.bad) == {"wrong", "hangs"}
