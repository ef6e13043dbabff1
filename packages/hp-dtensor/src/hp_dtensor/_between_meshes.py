"""Redistribution between meshes: `NonMember`, and a check that all ranks make the same call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from ._errors import LayoutError, MeshError, UnsupportedError
from ._groups import ranks_of_both
from ._layout import Layout, checked_sizes, replicated
from ._planner import Plan
from .collectives._c10d import TorchCollectives
from .collectives._interface import Axis, RankMismatchError
from .ragged._checkpoint import checkpointed

# Error message for a redistribution between meshes that autograd would have to record.
NO_GRADIENT = (
    "gradients do not pass between meshes: redistribute x.detach(), or call redistribute under "
    "torch.no_grad(); to train through the tensor, keep it on one mesh, or send it between "
    "pipeline stages with torch.distributed.pipelining"
)


class _NoTensor(TypeError, AttributeError):
    """Raised if a `NonMember` is used as a tensor.

    It is a TypeError, and also an AttributeError, so that ``hasattr`` returns False.
    """


@checkpointed(lambda absent: ())
@dataclass(frozen=True, slots=True)
class NonMember:
    """Represents a tensor on a rank that is not in the tensor's mesh.

    The object has no data. Using it as a tensor raises TypeError. A distributed checkpoint saves
    nothing for a `NonMember`. Remove it from a state dict before loading: torch's loader accepts
    tensors only.

    Args:
        layout: Layout of the tensor. ``layout.ranks`` are the global ranks of the tensor's mesh.
        shape: Global shape.
        dtype: Dtype of the tensor.

    Raises:
        LayoutError: ``layout`` is not a `Layout`, or a tensor of this shape cannot have the layout.

    Examples:
        >>> NonMember(Layout((2,), (Shard(0),), ranks=(4, 5)), (8, 8), torch.float32).shape
        (8, 8)
    """

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: ClassVar[bool] = False  # Gradients do not pass between meshes.

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.layout), Layout):
            raise LayoutError(f"a NonMember takes the tensor's Layout, got {self.layout!r}")
        object.__setattr__(self, "shape", checked_sizes(self.shape))
        self.layout.check_shape(self.shape)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [item for each in given if isinstance(each, list | tuple) for item in each]
        absent = next(each for each in given if isinstance(each, cls))
        absent._refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        # Python looks up names with underscores itself, for example to copy or to pickle.
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "backward":
            raise _NoTensor(NO_GRADIENT)
        self._refuse(name)

    def __bool__(self) -> NoReturn:
        self._refuse("bool")

    def __len__(self) -> NoReturn:
        self._refuse("len")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("indexing")

    def _operate(self, *others: object) -> NoReturn:
        self._refuse("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _operate
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _operate

    def _refuse(self, use: str) -> NoReturn:
        raise _NoTensor(
            f"this rank holds no part of the tensor of shape {self.shape}, so {use} has nothing to "
            f"work on; it is on ranks {self.layout.ranks_in_words()} as {self.layout}: use it "
            "there, or redistribute it to a mesh with this rank"
        )


class _Fingerprint(NamedTuple):
    """Describes the transfer that one rank is about to make.

    If the transfers differ, the ranks exchange these objects and raise the same error.

    Attributes:
        rank: Global rank.
        digest: Hash of the transfer. It is equal on all ranks that make the same transfer.
        description: Text for the error message: the transfer, or the fault on this rank.
        needs_gradient: Whether autograd on this rank would record the transfer.
    """

    rank: int
    digest: bytes
    description: str
    needs_gradient: bool

    def __str__(self) -> str:
        return f"rank {self.rank} plans {self.description}"


class ConsistencyCheck:
    """Checks that all ranks of both meshes are about to make the same transfer.

    Each rank hashes the two layouts, the global shape, the dtype and the steps. One all-reduce of
    32 bytes compares the hashes. If the hashes differ, the ranks gather the descriptions of all
    transfers, and all ranks raise the same error.

    The check cannot compare transfers between different sets of ranks, because these use different
    process groups. The ranks then raise an error when their process group times out.
    """

    def __init__(
        self, plan: Plan, dtype: torch.dtype, find: Callable[[], Axis], device: str
    ) -> None:
        # On an axis with one rank, all placements are equivalent, so their hashes must be equal.
        source, target = replicated(plan.source), replicated(plan.target)
        self._ranks = list(ranks_of_both(plan))
        steps = [str(step) for step in plan.steps]
        exact = repr((source, target, tuple(plan.shape), str(dtype), steps))
        # The text of a layout is long if the mesh has many ranks. Hash it once, not in each call.
        self._base = sha256(exact.encode()).hexdigest()
        kinds = " and ".join(step.kind for step in plan.steps)
        self._description = (
            f"{dtype} of shape {list(plan.shape)} from {_described(source)} to "
            f"{_described(target)} by {kinds}"
        )
        self._find = find
        self._device = device

    def __call__(self, fault: str, needs_gradient: bool) -> None:
        """Wait for all ranks, and raise on all of them if their transfers differ.

        Args:
            fault: Description of a problem on this rank. Empty if there is no problem.
            needs_gradient: Whether autograd would record the transfer on this rank.

        Raises:
            UnsupportedError: Autograd would record the transfer on some rank.
            RankMismatchError: The ranks make different transfers, only some ranks have a fault, or
                a rank does not make the call before the process group times out.
            LayoutError: All ranks have the same fault.
        """
        description = fault or self._description
        digest = sha256(f"{self._base} {needs_gradient} {fault}".encode()).digest()
        mine = _Fingerprint(dist.get_rank(), digest, description, needs_gradient)
        # All ranks have the same number n if the maximum of n equals the minimum of n. The minimum
        # is -max(-n), so one all-reduce with "max" is enough.
        numbers = [int.from_bytes(digest[at : at + 7], "little") for at in (0, 7)]
        maxima = torch.tensor([*numbers, *(-n for n in numbers)], device=self._device)
        try:
            # The first call creates the process group, and waits for the other ranks.
            axis = self._find()
            found: list[Any] = [mine] * axis.size
            (maxima,) = TorchCollectives().all_reduce(axis, [maxima], "max").wait()
            high, low, high_opposite, low_opposite = maxima.tolist()
            if differs := (high, low) != (-high_opposite, -low_opposite):
                dist.all_gather_object(found, mine, cast(dist.ProcessGroup, axis.group))
        except MeshError:
            raise
        except RuntimeError as error:
            raise self._timed_out(mine) from error
        if any(each.needs_gradient for each in found):
            raise UnsupportedError(NO_GRADIENT)
        if differs:
            raise _difference(found)
        if fault:
            raise LayoutError(fault)

    def _timed_out(self, mine: _Fingerprint) -> RankMismatchError:
        return RankMismatchError(
            f"ranks {self._ranks} did not all take part in time in the transfer that rank "
            f"{mine.rank} plans as {mine.description}; some did not make the call, made it "
            "with other groups=, or with meshes that have other ranks than these"
        )


def _difference(found: Sequence[_Fingerprint]) -> RankMismatchError:
    first = min(found)
    other = min(each for each in found if each.digest != first.digest)
    return RankMismatchError(
        f"the ranks of both meshes plan different transfers: {first}; "
        f"{other}; call on all of them with the same tensor, or a NonMember that "
        "says the same of it, and the same target, cost and max_bytes"
    )


def _described(layout: Layout) -> str:
    mesh = f"a mesh of shape {list(layout.mesh_shape)}"
    return f"{layout} on ranks {layout.ranks_in_words()} as {mesh}"
