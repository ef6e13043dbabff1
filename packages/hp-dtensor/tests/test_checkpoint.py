"""Checkpoints with flipped bits: wrong values never load without an error."""

import contextlib
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hp_dtensor.checkpoint import ChecksumError, ChecksumReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
BITS = 300


def state() -> dict[str, object]:
    weights = torch.arange(300, dtype=torch.float64).view(3, 100)
    return {"weight": weights, "bias": torch.ones(4, dtype=torch.bfloat16), "step": 7}


def empty() -> dict[str, object]:
    return {k: torch.zeros_like(v) if isinstance(v, Tensor) else 0 for k, v in state().items()}


def equal(found: dict[str, object]) -> bool:
    return all(
        torch.equal(found[k], v) if isinstance(v, Tensor) else found[k] == v  # type: ignore[arg-type]
        for k, v in state().items()
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp_save(state(), checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def load(reader: FileSystemReader) -> dict[str, object]:
    found = empty()
    dcp_load(found, storage_reader=reader, no_dist=True)
    return found


def test_a_whole_checkpoint_loads(saved: Path) -> None:
    assert equal(load(ChecksumReader(saved)))


def test_no_flipped_bit_loads_as_other_values(saved: Path) -> None:
    """torch's own reader takes some of the same flips for values: the reason for this one."""
    path = saved / "__0_0.distcp"
    whole = path.read_bytes()
    silent = refused = 0
    for bit in random.Random(0).sample(range(8 * len(whole)), BITS):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with contextlib.suppress(CheckpointException):
            silent += not equal(load(FileSystemReader(saved)))
        try:
            assert equal(load(ChecksumReader(saved))), f"bit {bit} loaded as another value"
        except CheckpointException as error:
            refused += isinstance(error.failures[0][0], ChecksumError)
    assert silent > BITS // 20
    assert refused > silent


def test_the_message_names_file_and_tensor(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    whole = bytearray(path.read_bytes())
    at = whole.index(state()["weight"].numpy().tobytes())  # type: ignore[attr-defined]
    whole[at + 1000] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointException) as raised:
        load(ChecksumReader(saved))
    said = str(raised.value.failures[0][0])
    assert said.startswith(f"{path} is damaged: a wrong checksum of record ")
    assert " in weight (bytes " in said
    assert said.endswith("; load another checkpoint")


def test_items_that_are_not_read_are_not_checked(saved: Path) -> None:
    path = saved / "__0_0.distcp"
    whole = bytearray(path.read_bytes())
    whole[whole.index(state()["weight"].numpy().tobytes())] ^= 1  # type: ignore[attr-defined]
    path.write_bytes(whole)
    found = {"bias": torch.zeros(4, dtype=torch.bfloat16)}
    dcp_load(found, storage_reader=ChecksumReader(saved), no_dist=True)
    assert torch.equal(found["bias"], torch.ones(4, dtype=torch.bfloat16))
