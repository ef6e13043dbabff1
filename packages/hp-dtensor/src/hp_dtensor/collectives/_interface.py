"""What the packages ask of communication: an axis, and six collectives over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
Parts = Tensor | Sequence[Tensor]  # what one rank sends another at once


class RankMismatchError(RuntimeError):
    """Ranks that should do the same do not; where it is found out, all of them raise it."""


class Group(Protocol):
    """The part of ``torch.distributed.ProcessGroup`` that the packages use."""

    def rank(self) -> int:
        """Return this process's index in the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks in the group."""
        ...


class AxisMesh(Protocol):
    """A mesh whose axes can be looked up; ``torch.distributed.device_mesh.DeviceMesh`` is one.

    Example:
        >>> Axis.of(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), "tp")
    """

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        ...

    @property
    def mesh(self) -> Any:
        """Return the global ranks, an array with ``tolist()``."""
        ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Return the axis names, outermost first."""
        ...

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the group of one axis."""
        ...

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this process's coordinate on one axis."""
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as this process sees it: its name, its group, and the group's global ranks.

    ``size`` is the number of ranks.

    Example:
        >>> Axis.of(mesh, "tp").size
    """

    name: str
    group: Group
    ranks: tuple[int, ...]
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Count the ranks once: every collective asks several times."""
        object.__setattr__(self, "size", len(self.ranks))

    def __deepcopy__(self, memo: object) -> "Axis":
        # A group is running processes: a copied module communicates over the same ones.
        return self

    @property
    def index(self) -> int:
        """Return this process's coordinate on the axis."""
        return self.group.rank()

    @staticmethod
    def of(mesh: AxisMesh, mesh_dim: int | str = 0) -> "Axis":
        """Return one axis of ``mesh``, chosen by position or name; communicates nothing.

        Raises ValueError for an axis that is not there, and for one whose ranks the mesh lists in
        another order than its process group does, where a coordinate would not say who is meant.
        """
        names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
        if isinstance(mesh_dim, str):
            if mesh_dim not in names:
                raise ValueError(f"no axis {mesh_dim!r} in a mesh with axes {list(names)}")
            mesh_dim = names.index(mesh_dim)
        elif not 0 <= mesh_dim < mesh.ndim:
            raise ValueError(f"no axis {mesh_dim} in a mesh with {mesh.ndim} axes")
        ranks = mesh.mesh.tolist()
        for position in range(mesh.ndim):
            if position < mesh_dim:
                ranks = ranks[mesh.get_local_rank(position)]
            elif position > mesh_dim:
                ranks = [row[mesh.get_local_rank(position)] for row in ranks]
        group = mesh.get_group(mesh_dim)
        in_group = get_process_group_ranks(group) if isinstance(group, ProcessGroup) else ranks
        if ranks != in_group:
            raise ValueError(
                f"the mesh lists axis {names[mesh_dim]!r} as ranks {ranks}, its process group as "
                f"{in_group}; build the mesh with ascending ranks"
            )
        return Axis(names[mesh_dim], group, tuple(ranks))


def check_divisible(axis: Axis, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless a reduce-scatter over ``axis`` can cut dim 0 of all inputs evenly."""
    for tensor in inputs:
        if tensor.shape[0] % axis.size:
            raise ValueError(
                f"reduce_scatter over {axis.name} needs dim 0 divisible by {axis.size}, "
                f"got {tuple(tensor.shape)}; pad it or use all_to_all with splits"
            )


class Waitable(Protocol):
    """What was started: a `Work`, or c10d's own, which returns no tensors."""

    def wait(self) -> object:
        """Wait until the outputs are complete for use on the caller's stream."""
        ...


@runtime_checkable
class Work(Protocol):
    """A collective under way.

    Example:
        >>> work = collectives.all_reduce(axis, [loss])
        >>> (total,) = work.wait()
    """

    def wait(self) -> list[Tensor]:
        """Return the outputs, complete for use on the caller's stream; may be called again.

        Raises the first error of what it waits for, after waiting for all of it.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """Collectives over an `Axis`; each call starts at once and returns its `Work`.

    Every rank of the axis makes the same calls in the same order. Lists of tensors on one device
    are coalesced into one call where the backend can, all-reduces into one for each dtype;
    broadcasts are a call for each tensor. Inputs must stay untouched
    until `Work.wait`. Outputs are allocated where they are not given; those that are may have any
    strides. Nothing here is differentiable; see `AutogradCollectives` for that.

    Example:
        >>> (whole,) = collectives.all_gather(Axis.of(mesh, "tp"), [part]).wait()
    """

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Concatenate each input ``[n, ...]`` over the axis in rank order: ``[size * n, ...]``."""
        ...

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input ``[size * n, ...]`` and keep this rank's ``[n, ...]``.

        The sum of bools is True if one of them is, as in torch.
        """
        ...

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor over the axis, in place.

        The sum of bools is True if one of them is, as in torch.
        """
        ...

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Send row block ``i`` of ``input`` to rank ``i``; blocks are equal or ``send_splits``.

        The output ``[sum(receive_splits), ...]`` holds what each rank sent here, in rank order.
        """
        ...

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send and receive whole tensors point to point; keys are coordinates on the axis.

        A peer may get several tensors at once, and receives as many, of the same shapes. Returns
        the filled ``receives`` in the order of their keys.

        A rank with nothing to send and nothing to receive may leave the call out, with two
        exceptions:

        - NCCL connects all ranks of a group in the group's first call. If that call is a
          ``send_recv``, every rank of the group must send or receive in it, or the other ranks may
          wait forever. If some ranks take no part, let all ranks of the group make another call
          over it before, such as ``all_reduce`` of one element. Once per group is enough.
        - Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch raises in the next collective over a gloo
          group unless all of its ranks have sent and received the same number of messages.
        """
        ...

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with that of coordinate ``source``."""
        ...


def as_tensors(parts: Parts) -> list[Tensor]:
    """Return what travels together as a list."""
    return [parts] if isinstance(parts, Tensor) else list(parts)


def own_fault(axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> str:
    """Say why a rank does not receive from itself what it sends itself; empty if it does."""
    me = axis.index
    if me not in sends and me not in receives:
        return ""
    sent, received = (described(as_tensors(peers.get(me, ()))) for peers in (sends, receives))
    if sent == received:
        return ""
    return (
        f"rank {axis.ranks[me]} sends itself {sent or 'nothing'} over {axis.name} and receives "
        f"{received or 'nothing'} from itself; give both, of the same shapes and dtypes"
    )


def described(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and shapes for a message."""
    return ", ".join(f"{dtype_name(tensor)} {list(tensor.shape)}" for tensor in tensors)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype as messages have it."""
    return str(tensor.dtype).removeprefix("torch.")
