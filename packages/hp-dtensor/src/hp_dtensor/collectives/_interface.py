"""What the packages ask of communication: an axis, and six collectives over it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
Parts = Tensor | Sequence[Tensor]  # what one rank sends another at once


class RankMismatchError(RuntimeError):
    """Raised on all ranks that detect it if ranks make different calls or one of them fails."""


class Group(Protocol):
    """The part of ``torch.distributed.ProcessGroup`` that the packages use."""

    def rank(self) -> int:
        """Return this process's index in the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks in the group."""
        ...


class AxisMesh(Protocol):
    """A mesh with named axes; ``torch.distributed.device_mesh.DeviceMesh`` is one.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> Axis.of(mesh, "tp").size
        2
    """

    @property
    def ndim(self) -> int:
        """Number of axes."""
        ...

    @property
    def mesh(self) -> Any:
        """Global ranks, as an array with ``tolist()``."""
        ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the axes, outermost first, or None."""
        ...

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the process group of one axis.

        Args:
            mesh_dim: Position or name of the axis.

        Returns:
            The process group.
        """
        ...

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the coordinate of this process on one axis.

        Args:
            mesh_dim: Position or name of the axis.

        Returns:
            The coordinate.
        """
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis, as seen by this process.

    ``size`` is the number of ranks.

    Args:
        name: Name of the axis, for messages and statistics.
        group: Process group of this rank.
        ranks: Global ranks of the group, in the order of their coordinates.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> axis = Axis.of(mesh, "tp")
        >>> axis.name, axis.size
        ('tp', 2)
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
        """Coordinate of this process on the axis."""
        return self.group.rank()

    @staticmethod
    def of(mesh: AxisMesh, mesh_dim: int | str = 0) -> "Axis":
        """Return one axis of a mesh. Communicates nothing.

        Args:
            mesh: A torch mesh, or an object with the same methods.
            mesh_dim: Position or name of the axis.

        Returns:
            The axis.

        Raises:
            ValueError: The axis does not exist, or the mesh lists its ranks in another order than
                its process group.
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
    """A collective in flight.

    Examples:
        On 4 ranks:

        >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
        >>> work = TorchCollectives().all_reduce(axis, [torch.ones(2)])
        >>> work.wait()
        [tensor([4., 4.])]
    """

    def wait(self) -> list[Tensor]:
        """Wait for the collective. A second call returns the same tensors.

        Returns:
            The outputs, ready for use on the caller's stream.

        Raises:
            RuntimeError: The collective failed. If several did, the first error is raised after
                waiting for all of them.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """Collectives over an `Axis`. Each call starts at once and returns its `Work`.

    Every rank of the axis makes the same calls in the same order. Do not change inputs before
    `Work.wait`. Outputs that are not given are allocated; given ones may have any strides. Lists of
    tensors on one device are coalesced into one call if the backend supports it: all-reduces into
    one for each dtype; broadcasts are not coalesced. Nothing is differentiable; see
    `AutogradCollectives`.

    Examples:
        >>> from hp_dtensor.testing import SimulatedWorld
        >>> def gather(rank, collectives):
        ...     axis = collectives.axis()
        ...     (whole,) = collectives.all_gather(axis, [torch.tensor([rank])]).wait()
        ...     return whole.tolist()
        >>> SimulatedWorld(2).run(gather)
        [[0, 1], [0, 1]]
    """

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Concatenate each input over the axis, in rank order.

        Args:
            axis: Ranks that take part.
            inputs: Tensors ``[n, ...]`` with the same shapes on all ranks.
            outputs: Tensors ``[size * n, ...]`` for the results.

        Returns:
            The work. Its outputs have the shape ``[size * n, ...]``.
        """
        ...

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input over the axis and keep this rank's part of dim 0.

        Args:
            axis: Ranks that take part.
            inputs: Tensors ``[size * n, ...]``.
            outputs: Tensors ``[n, ...]`` for the results.
            op: Reduction. The sum of bools is True if one of them is, as in torch.

        Returns:
            The work. Its outputs have the shape ``[n, ...]``.

        Raises:
            ValueError: The number of ranks does not divide dim 0 of an input.
        """
        ...

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor over the axis, in place.

        Args:
            axis: Ranks that take part.
            tensors: Inputs and outputs, with the same shapes on all ranks.
            op: Reduction. The sum of bools is True if one of them is, as in torch.

        Returns:
            The work. Its outputs are ``tensors``.
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
        """Send one block of rows to each rank, and receive one from each.

        Args:
            axis: Ranks that take part.
            input: Rows to send, ``[rows, ...]``. Block ``i`` goes to coordinate ``i``.
            send_splits: Number of rows for each rank. None means equal blocks.
            receive_splits: Number of rows from each rank. None means equal blocks.
            output: Tensor ``[sum(receive_splits), ...]`` for the result.

        Returns:
            The work. Its output has the received blocks in rank order.

        Raises:
            ValueError: The splits do not fit the axis or the rows.
        """
        ...

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send and receive whole tensors point to point.

        A peer may get several tensors in one call. It has to receive as many, with the same shapes.

        Args:
            axis: Ranks among which tensors are sent.
            sends: Tensors to send, by the receiver's coordinate on the axis.
            receives: Tensors to fill, by the sender's coordinate on the axis.

        Returns:
            The work. Its outputs are the tensors of ``receives``, in the order of the keys.

        Raises:
            ValueError: A rank sends itself other tensors than it receives from itself.

        Note:
            A rank without messages may omit the call, with two exceptions:

            - NCCL connects all ranks of a group in the group's first call. If that call is a
              ``send_recv``, every rank of the group has to send or receive in it, or the other
              ranks can wait forever. Otherwise, make another call over the whole group before, such
              as ``all_reduce`` of one element. Once per group is enough.
            - With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, the next collective over a gloo group raises
              unless all ranks have sent and received the same number of messages.
        """
        ...

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with the tensor of one rank.

        Args:
            axis: Ranks that take part.
            tensors: Tensors to send or to overwrite, with the same shapes on all ranks.
            source: Coordinate of the sender on the axis.

        Returns:
            The work. Its outputs are ``tensors``.
        """
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
