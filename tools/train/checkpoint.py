"""Save and load a run with torch's distributed checkpoint."""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .loop import Trainer
from .options import RUN_FILE

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(trainer: Trainer, folder: Path, identity: Mapping[str, Any]) -> None:
    """Write the parameters, AdamW's state, step and samples consumed to ``folder``.

    Every rank calls this. The folder takes its name when it is complete, so that what bears the
    name can be read whole.
    """
    partial = folder.with_name(folder.name + ".partial")
    if _first():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    with _alone_in_silence():
        dcp_save(_state(trainer), checkpoint_id=partial, no_dist=not dist.is_initialized())
    _barrier()
    if _first():
        fields = {**identity, "step": trainer.step, "samples": trainer.samples}
        (partial / RUN_FILE).write_text(json.dumps(fields, indent=1))
        previous = folder.with_name(folder.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            os.replace(folder, previous)
        os.replace(partial, folder)
        shutil.rmtree(previous, ignore_errors=True)
    _barrier()


def load(trainer: Trainer, folder: Path) -> None:
    """Fill ``trainer`` in place with what `save` wrote under the same degrees."""
    state = _state(trainer)
    with _alone_in_silence():
        dcp_load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    fields = json.loads((folder / RUN_FILE).read_text())
    trainer.step, trainer.samples = int(fields["step"]), int(fields["samples"])


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the tensors by name, aliases of the trainer's; AdamW's zeros where it has no state."""
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        moments[name] = {key: state[key] for key in ("step", *MOMENTS)}
    return {"model": trainer.model.state_dict(), "optimizer": moments}


@contextlib.contextmanager
def _alone_in_silence() -> Iterator[None]:
    """Drop torch's warning that there is one process: that is what the reference run is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
