"""The tensors of a model by name, and errors that all ranks raise together."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from .._errors import CheckpointError
from .._torch import EXTRA_STATE

T = TypeVar("T")
Box = tuple[tuple[int, int], ...]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 8  # names that an error lists of each kind
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
# Names that wrappers of torch insert: `torch.compile(model)` and activation checkpointing.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter or buffer of a model: a tensor, and all names that it has there."""

    names: tuple[str, ...]
    tensor: Tensor


def library() -> Any:
    """Return ``safetensors.safe_open``."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ImportError(
            "safetensors files need the package safetensors; pip install 'hp-fsdp[safetensors]'"
        ) from error
    return safe_open


def targets_of(model: nn.Module) -> list[Target]:
    """Return the parameters and persistent buffers of a model in their sharded state."""
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


def check_states(model: nn.Module, given: Collection[str]) -> None:
    """Raise `CheckpointError` for modules whose state is more than tensors.

    Such a state can say how to read the parameters, as the order of experts in hp-ep does. The
    files cannot have it, so sources must be ``given`` for the parameters of the module.
    """
    for key in model.state_dict(keep_vars=True):
        prefix, _, name = plain_name(key).rpartition(".")
        if name != EXTRA_STATE:
            continue
        module = model.get_submodule(key.rpartition(".")[0])
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        lacking = [name for name in own if name not in given]
        if lacking:
            raise CheckpointError(
                f"the state of {prefix or 'the model'}, a {type(module).__name__}, has more than "
                f"tensors ({EXTRA_STATE}), which the files cannot have; pass sources= for "
                f"{listed(lacking)}, as hp_ep.expert_sources(model) makes them"
            )


def plain_name(name: str) -> str:
    """Return the name without the parts that wrappers insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's number in the group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def gather(group: ProcessGroup | None, own: T) -> list[T]:
    """Return the objects of all ranks, by rank."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def on_all_ranks(group: ProcessGroup | None, make: Callable[[], T]) -> T:
    """Return this rank's result; raise on all ranks if any of them failed."""
    result, error = _tried(make)
    _raise_first(gather(group, _text(error)), error)
    return cast(T, result)


def on_first_rank(group: ProcessGroup | None, make: Callable[[], T]) -> T:
    """Return the result of the first rank; raise on all ranks if it failed."""
    result, error = _tried(make) if rank_in(group) == 0 else (None, None)
    found: list[Any] = [(result, _text(error))]
    if dist.is_initialized():
        first = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast_object_list(found, src=first, group=group)
    made, failure = found[0]
    _raise_first([failure], error)
    return cast(T, made)


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it, so that none waits
        return None, error


def _text(error: Exception | None) -> str | None:
    if error is None or isinstance(error, CheckpointError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def _raise_first(failures: Sequence[str | None], own: Exception | None) -> None:
    """Raise the failure of the first rank that has one, on all ranks."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            everywhere = all(other == failure for other in failures)
            raise CheckpointError(failure if everywhere else f"rank {rank}: {failure}") from own


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Return the index of a box in a tensor whose first element is at the start of ``origin``."""
    starts = [0] * len(box) if origin is None else [lo for lo, _ in origin]
    return tuple(slice(lo - s, hi - s) for (lo, hi), s in zip(box, starts, strict=True))
