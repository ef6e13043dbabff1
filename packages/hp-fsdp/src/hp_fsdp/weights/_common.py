"""Shared functions of loading and saving: names of tensors, and errors raised on all ranks."""

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from hp_dtensor.torch_compat import EXTRA_STATE_KEY

from .._errors import CheckpointError

T = TypeVar("T")
Box = tuple[tuple[int, int], ...]  # a half-open range of indices for each dim

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 8  # largest number of names in a list of an error message
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# ``torch.compile(model)`` and activation checkpointing insert these parts into parameter names.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter or buffer of a model, with its names. A tied parameter has several names."""

    names: tuple[str, ...]
    tensor: Tensor


def safe_open() -> Any:
    """Return the function ``safetensors.safe_open``.

    Raises:
        ImportError: The package safetensors is missing.
    """
    try:
        from safetensors import safe_open as found
    except ModuleNotFoundError as error:
        raise ImportError(
            "safetensors files need the package safetensors; pip install 'hp-fsdp[safetensors]'"
        ) from error
    return found


def targets_of(model: nn.Module) -> list[Target]:
    """Reshard the model, and return its parameters and persistent buffers.

    Their names do not contain the parts that wrappers insert; see `plain_name`.
    """
    for module in model.modules():
        if isinstance(module, TorchFSDPModule):
            module.reshard()
    saved = {plain_name(name) for name in model.state_dict(keep_vars=True)}
    by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in [*parameters, *buffers]:
        plain = plain_name(name)
        if isinstance(tensor, nn.Parameter) or plain in saved:
            by_tensor.setdefault(id(tensor), (tensor, []))[1].append(plain)
    return [Target(tuple(names), tensor) for tensor, names in by_tensor.values()]


def check_extra_states(model: nn.Module, given: Collection[str]) -> None:
    """Raise `CheckpointError` if a module has extra state that a weight file would lose.

    Extra state (``nn.Module.get_extra_state``) may describe how to read the parameters, such as
    the order of experts in hp-ep. Weight files cannot store extra state. If a module with extra
    state has no parameters, the function only warns.

    ``given``: names of the parameters with explicit sources. If all parameters of a module have
    explicit sources, its extra state is not needed, and the function does not raise.
    """
    for key in model.state_dict(keep_vars=True):
        prefix, _, name = plain_name(key).rpartition(".")
        if name != EXTRA_STATE_KEY:
            continue
        module = model.get_submodule(key.rpartition(".")[0])
        path = f"{prefix or 'the model'}, a {type(module).__name__},"
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        if not own:
            warnings.warn(
                f"{path} has extra state ({EXTRA_STATE_KEY}), which files of weights do not store",
                stacklevel=2,
            )
        lacking = [name for name in own if name not in given]
        if lacking:
            raise CheckpointError(
                f"{path} has extra state ({EXTRA_STATE_KEY}), which files of weights cannot store; "
                f"pass sources= for {listed(lacking)}, as hp_ep.expert_sources(model) makes them"
            )


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers insert.

    For example, ``"_orig_mod.head.weight"`` becomes ``"head.weight"``.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def folder_of(folder: object) -> Path:
    """Return ``folder`` as a `Path`. Raises `CheckpointError` if it is not a path or is empty."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise CheckpointError(f"folder={folder!r} is not the path of a folder")
    return Path(folder)


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's number in the group; 0 if there is no process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def on_all_ranks(group: ProcessGroup | None, make: Callable[[], T]) -> T:
    """Call ``make`` on each rank and return this rank's result. If a rank fails, all ranks raise.

    All ranks raise the error of the lowest rank that failed.

    Raises:
        ImportError: ``make`` raised an ``ImportError`` on that rank.
        CheckpointError: ``make`` raised any other exception on that rank.
    """
    result, error = _tried(make)
    failures: list[Any] = [_described(error)]
    if dist.is_initialized():
        failures *= dist.get_world_size(group)
        dist.all_gather_object(failures, failures[0], group=group)
    _raise_first(failures, error)
    return cast(T, result)


def on_first_rank(group: ProcessGroup | None, make: Callable[[], T]) -> T:
    """Call ``make`` on the first rank only, broadcast the result, and return it on all ranks.

    If ``make`` raises, all ranks raise the error that `on_all_ranks` describes.
    """
    result, error = _tried(make) if rank_in(group) == 0 else (None, None)
    found: list[Any] = [(result, _described(error))]
    if dist.is_initialized():
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(found, src=first, group=group)
    made, failure = found[0]
    _raise_first([failure], error)
    return cast(T, made)


def distinct_objects(group: ProcessGroup | None, own: T) -> dict[int, T]:
    """Gather the objects of all ranks, without duplicates.

    Objects are duplicates if they have the same ``repr``. Ranks with the same part of a model have
    equal objects, so time and memory do not grow with the number of ranks.

    Returns:
        A dict of the different objects. The key of an object is the first rank that has it.
    """
    if not dist.is_initialized():
        return {0: own}
    digest = sha256(repr(own).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    found: dict[int, T] = {}
    for rank in sorted({each: digests.index(each) for each in digests}.values()):
        sent: list[Any] = [own]
        source = rank if group is None else dist.get_global_rank(group, rank)
        dist.broadcast_object_list(sent, src=source, group=group)
        found[rank] = sent[0]
    return found


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it, so that none waits
        return None, error


def _described(error: Exception | None) -> tuple[bool, str] | None:
    """Convert an error to a pair: whether it is an ImportError, and its message.

    Returns None if ``error`` is None.
    """
    if error is None:
        return None
    known = isinstance(error, CheckpointError | ImportError)
    return isinstance(error, ImportError), str(
        error
    ) if known else f"{type(error).__name__}: {error}"


def _raise_first(failures: Sequence[tuple[bool, str] | None], own: Exception | None) -> None:
    """Raise the error of the first rank that failed. A no-op if no rank failed.

    ``failures``: result of `_described` for each rank. ``own``: the error of this rank, if any.
    """
    for rank, failure in enumerate(failures):
        if failure is not None:
            text = failure[1] if all(each == failure for each in failures) else ""
            kind = ImportError if failure[0] else CheckpointError
            raise kind(text or f"rank {rank}: {failure[1]}") from own


def listed(names: Sequence[str]) -> str:
    """Return the first `LISTED` names as text, followed by the number of other names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return the slices that select ``box`` from a tensor that holds the elements of ``origin``.

    A box is one range ``(start, stop)`` per dim of the whole tensor. ``origin`` is a box that
    contains ``box``. If ``origin`` is None, the tensor holds all elements.
    """
    starts = [0] * len(box) if origin is None else [lo for lo, _ in origin]
    return tuple(slice(lo - s, hi - s) for (lo, hi), s in zip(box, starts, strict=True))
