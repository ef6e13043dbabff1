"""Checkpoints on one process: what bears the name is whole."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from train.checkpoint import CheckpointError, Checkpoints, WriteError, load
from train.config import ModelConfig, TrainConfig
from train.data import Samples
from train.loop import Trainer
from train.model import build_model
from train.run_folder import CHECKSUMS_FILE, PREVIOUS, RUN_FILE

TINY = ModelConfig(
    hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2
)
SHORT = TrainConfig(batch_size=2, seq_len=8)
DATA = Samples(b"the cat sat on the mat. " * 40, SHORT.seq_len, 0)


def _trainer() -> Trainer:
    return Trainer(build_model(TINY, 0), SHORT)


def _step(folder: Path) -> int:
    step: int = json.loads((folder / RUN_FILE).read_text())["step"]
    return step


def test_a_run_goes_on_bitwise_from_what_was_saved(tmp_path: Path) -> None:
    trainer, checkpoints = _trainer(), Checkpoints(tmp_path / "checkpoint", {})
    trainer.train_step(DATA)
    checkpoints.start(trainer)
    expected = [trainer.train_step(DATA).loss for _ in range(3)]
    checkpoints.finish()
    again = _trainer()
    load(again, tmp_path / "checkpoint")
    assert (again.step, again.samples) == (1, 2)
    assert [again.train_step(DATA).loss for _ in range(3)] == expected


def test_a_write_that_is_cut_off_never_becomes_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint"
    trainer, checkpoints = _trainer(), Checkpoints(folder, {})
    trainer.train_step(DATA)
    checkpoints.start(trainer)
    checkpoints.finish()
    trainer.train_step(DATA)
    with monkeypatch.context() as broken:

        def fail(*args: object, **options: object) -> None:
            raise OSError("no space left")

        broken.setattr(torch, "save", fail)
        said = r"of step 2 was not written to .*partial \(rank 0: no space left\), where .* free; "
        with pytest.raises(OSError, match=said) as raised:
            checkpoints.start(trainer)
        assert str(raised.value).endswith(f"; {folder} is the previous one")
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
        (tmp_path / "other").mkdir()
        with pytest.raises(OSError, match=r"; there is no previous one$"):
            Checkpoints(tmp_path / "other" / "checkpoint", {}).start(trainer)
        assert not [*(tmp_path / "other").iterdir()]
        (tmp_path / "other").rmdir()
    assert _step(folder) == 1
    checkpoints.start(trainer)
    checkpoints.finish()
    assert _step(folder) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_last_checkpoints_stay_with_their_steps(tmp_path: Path) -> None:
    trainer, checkpoints = _trainer(), Checkpoints(tmp_path / "checkpoint", {}, keep=3)
    for own in ("checkpoint-of-mine", "checkpoint-0", "checkpoint-2"):
        (tmp_path / own).mkdir()
        (tmp_path / own / "notes").write_text("mine")
    for _ in range(5):
        trainer.train_step(DATA)
        checkpoints.start(trainer)
        checkpoints.finish()
    found = {path.name: path for path in tmp_path.iterdir()}
    of_user = {"checkpoint-of-mine", "checkpoint-0", "checkpoint-2"}
    assert [(found[name] / "notes").read_text() for name in of_user] == ["mine"] * 3
    assert found.keys() == {"checkpoint", "checkpoint-3", "checkpoint-4"} | of_user
    assert [_step(found[n]) for n in ("checkpoint-3", "checkpoint-4", "checkpoint")] == [3, 4, 5]
    again = _trainer()
    load(again, found["checkpoint-3"])
    assert (again.step, again.samples) == (3, 6)
    (found["checkpoint"] / RUN_FILE).write_text("")  # as after a loss of power
    trainer.train_step(DATA)
    checkpoints.start(trainer)
    checkpoints.finish()
    assert {path.name for path in tmp_path.iterdir()} == found.keys()
    assert _step(tmp_path / "checkpoint") == 6


def _saved_twice(run: Path) -> Path:
    """Return the latest of two checkpoints, of step 2; ``checkpoint-1`` is in the same folder."""
    trainer, checkpoints = _trainer(), Checkpoints(run / "checkpoint", {}, keep=2)
    for _ in range(2):
        trainer.train_step(DATA)
        checkpoints.start(trainer)
        checkpoints.finish()
    return run / "checkpoint"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _turn(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("harm", [_cut, _turn, _empty, Path.unlink])
def test_a_damaged_file_is_named_with_the_checkpoints_that_are_whole(
    tmp_path: Path, name: str, harm: Callable[[Path], object], capfd: pytest.CaptureFixture[str]
) -> None:
    latest = _saved_twice(tmp_path)
    harm(latest / name)
    with pytest.raises(CheckpointError) as raised:
        load(_trainer(), latest)
    said = str(raised.value)
    assert f"{latest / name}" in said
    remedy = (
        f"; resume from another one in a new folder: --resume {tmp_path / 'checkpoint-1'} --out NEW"
    )
    assert said.endswith(remedy)
    assert "\n" not in said
    assert capfd.readouterr().err == ""
    _empty(tmp_path / "checkpoint-1" / "__0_0.distcp")
    with pytest.raises(
        CheckpointError, match=r"; there is no other intact checkpoint in the folder$"
    ):
        load(_trainer(), latest)


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    latest = _saved_twice(tmp_path)
    deeper = Trainer(build_model(replace(TINY, num_hidden_layers=3), 0), SHORT)
    with pytest.raises(CheckpointError) as raised:
        load(deeper, latest)
    said = str(raised.value)
    assert said.startswith(f"{latest} is damaged and cannot be read (RuntimeError: Missing key")
    assert "blocks.2" in said


def test_the_whole_one_stays_until_a_newer_has_taken_the_place_of_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = _saved_twice(tmp_path)
    (tmp_path / "checkpoint-1").rename(tmp_path / PREVIOUS)
    _empty(latest / RUN_FILE)  # so that a run resumes from the one before
    trainer, checkpoints = _trainer(), Checkpoints(latest, {})
    load(trainer, tmp_path / PREVIOUS)
    trainer.train_step(DATA)

    def fail(*paths: Path) -> None:
        assert _step(tmp_path / PREVIOUS) == 1
        raise OSError("power is lost")

    with monkeypatch.context() as broken:
        broken.setattr("os.replace", fail)
        checkpoints.start(trainer)
        with pytest.raises(OSError, match="power is lost"):
            checkpoints.finish()
    checkpoints.start(trainer)
    checkpoints.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert _step(latest) == 2


def test_a_folder_that_is_removed_is_not_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    trainer, checkpoints = _trainer(), Checkpoints(out / "checkpoint", {})
    trainer.train_step(DATA)
    out.rmdir()
    with pytest.raises(WriteError, match=r"of step 1 was not written .*No such file.* are free; "):
        checkpoints.start(trainer)
    assert not out.exists()


def _flipped(path: Path, bit: int) -> Callable[[], object]:
    """Flip one bit of a file and return what undoes it."""
    whole = path.read_bytes()
    content = bytearray(whole)
    content[bit // 8 % len(whole)] ^= 1 << bit % 8
    path.write_bytes(content)
    return lambda: path.write_bytes(whole)


def _values(trainer: Trainer) -> list[torch.Tensor]:
    moments = [x for state in trainer.optimizer.state.values() for x in state.values()]
    counts = torch.tensor([trainer.step, trainer.samples])
    return [x.clone() for x in (*trainer.model.parameters(), *moments, counts)]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", RUN_FILE, CHECKSUMS_FILE])
def test_a_flipped_bit_never_loads_as_another_number(tmp_path: Path, name: str) -> None:
    latest = _saved_twice(tmp_path)
    again = _trainer()
    load(again, latest)
    expected, path = _values(again), latest / name
    refused = 0
    for bit in random.Random(0).sample(range(8 * path.stat().st_size), 10):
        undo = _flipped(path, bit)
        try:
            load(again, latest)
        except CheckpointError as error:
            refused += 1
            assert str(latest) in str(error)  # noqa: PT017
        else:
            assert all(map(torch.equal, _values(again), expected))
        undo()
    assert refused >= 3
    load(again, latest)
    assert all(map(torch.equal, _values(again), expected))
