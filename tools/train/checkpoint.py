"""Save and load a run with torch's distributed checkpoint."""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from .loop import Trainer
from .options import RUN_FILE

# One entry for each tensor: ranks of a pipeline have different ones.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


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
    settings = [{**group, "params": ()} for group in trainer.optimizer.param_groups]
    with _alone_in_silence():
        dcp_load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    for group, own in zip(trainer.optimizer.param_groups, settings, strict=True):
        group.update({**own, "params": group["params"]})  # this run's, not the saved one's
    fields = json.loads((folder / RUN_FILE).read_text())
    trainer.step, trainer.samples = int(fields["step"]), int(fields["samples"])


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return the model's tensors and AdamW's, by name; zeros where it has none yet."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=_BY_NAME)
    return {"model": model, "optimizer": optimizer}


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
