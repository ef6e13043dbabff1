"""The protocols `Collectives` and `Work`, and the class `Axis` for a group of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]
Parts = Tensor | Sequence[Tensor]  # the tensors that `send_recv` exchanges with one peer


class RankMismatchError(RuntimeError):
    """Raised if ranks call different collectives or hold different values, or if a rank fails.

    Every rank that detects the problem raises this error.
    """


class Group(Protocol):
    """Protocol of a process group.

    ``torch.distributed.ProcessGroup`` satisfies it, and so does the simulated group of
    `hp_dtensor.testing`.
    """

    def rank(self) -> int:
        """Return the index of this process in the group, from 0."""
        ...

    def size(self) -> int:
        """Return the number of ranks in the group."""
        ...


class AxisMesh(Protocol):
    """Protocol of the ``mesh`` argument of `Axis.of`.

    ``torch.distributed.device_mesh.DeviceMesh`` satisfies it. Any other class with the properties
    and methods below satisfies it too.

    Attributes:
        ndim: Number of axes.
        mesh: Global ranks, as an integer tensor or array with one dim per axis.
        mesh_dim_names: Names of the axes, outermost first, or None.
        get_group: Returns the process group of this process along one axis.
        get_local_rank: Returns the coordinate of this process on one axis.

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
        """Global ranks, as an integer tensor or array (with ``tolist()``) of the mesh's shape."""
        ...

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the axes, outermost first, or None if the axes have no names."""
        ...

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the process group of this process along one axis.

        Args:
            mesh_dim: Position or name of the axis. May be None if the mesh has one axis.

        Returns:
            The process group of the ranks along the axis, including this process.
        """
        ...

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the coordinate of this process on one axis.

        Args:
            mesh_dim: Position or name of the axis. May be None if the mesh has one axis.

        Returns:
            The coordinate, from 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """This process's group of ranks along one mesh axis.

    The attribute ``size`` is the number of these ranks.

    Args:
        name: Name of the axis, for error messages and statistics.
        group: Process group of these ranks.
        ranks: Global ranks of the group, in the order of their coordinates on the axis.

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
        """Store the number of ranks as ``size``, because collectives read it several times."""
        object.__setattr__(self, "size", len(self.ranks))

    def __deepcopy__(self, memo: object) -> "Axis":
        # A process group cannot be copied, so a copied module uses the same group.
        return self

    @property
    def index(self) -> int:
        """Coordinate of this process on the axis."""
        return self.group.rank()

    @staticmethod
    def of(mesh: AxisMesh, mesh_dim: int | str = 0) -> "Axis":
        """Return this process's group of ranks along one axis of a mesh. Communicates nothing.

        Args:
            mesh: A ``DeviceMesh``, or another object that satisfies `AxisMesh`.
            mesh_dim: Position or name of the axis.

        Returns:
            The ranks along the axis, including this process.

        Raises:
            ValueError: The mesh has no such axis, or the ranks have another order in ``mesh.mesh``
                than in the process group.
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
    """Raise ValueError if the length of dim 0 of an input is not a multiple of ``axis.size``."""
    for tensor in inputs:
        if tensor.shape[0] % axis.size:
            raise ValueError(
                f"reduce_scatter over {axis.name} needs dim 0 divisible by {axis.size}, "
                f"got {tuple(tensor.shape)}; pad it or use all_to_all with splits"
            )


def check_outputs(
    collective: str, axis: Axis, parts: Sequence[Tensor], wholes: Sequence[Tensor]
) -> None:
    """Raise ValueError unless each whole has ``axis.size`` times the elements of its part.

    Args:
        collective: Name of the collective, for the error message.
        axis: Axis of the collective.
        parts: Inputs of an all-gather, or outputs of a reduce-scatter.
        wholes: Outputs of the all-gather, or inputs of the reduce-scatter.
    """
    if len(parts) != len(wholes):
        raise ValueError(
            f"{collective} over {axis.name} got {len(parts)} and {len(wholes)} tensors as inputs "
            "and outputs; pass one output for each input"
        )
    for part, whole in zip(parts, wholes, strict=True):
        if part.dtype is not whole.dtype or whole.numel() != axis.size * part.numel():
            raise ValueError(
                f"{collective} over {axis.name} got {part.dtype} {tuple(part.shape)} for one rank "
                f"and {whole.dtype} {tuple(whole.shape)} for {axis.size} ranks; input and output "
                "must have the same dtype, and one of them the elements of all ranks"
            )


class Waitable(Protocol):
    """Handle of an operation in flight: a `Work`, or a ``torch.distributed.Work``.

    `Work.wait` returns the outputs. ``torch.distributed.Work.wait`` does not.
    """

    def wait(self) -> object:
        """Wait until the caller's current stream can use the outputs."""
        ...


@runtime_checkable
class Work(Protocol):
    """Handle of a collective in flight.

    Attributes:
        wait: Waits for the collective and returns its outputs.

    Examples:
        On 4 ranks:

        >>> axis = Axis.of(init_device_mesh("cpu", (4,)))
        >>> work = TorchCollectives().all_reduce(axis, [torch.ones(2)])
        >>> work.wait()
        [tensor([4., 4.])]
    """

    def wait(self) -> list[Tensor]:
        """Wait for the collective and return its outputs. A second call returns the same tensors.

        Call it from one thread at a time.

        Returns:
            The outputs, ready for use on the caller's stream.

        Raises:
            RuntimeError: The collective failed. If the collective consists of several operations,
                the error is that of the first failed operation. It is raised after all operations
                have ended.
        """
        ...


@runtime_checkable
class Collectives(Protocol):
    """Collectives over an `Axis`. Each call starts the communication and returns a `Work` handle.

    Every rank of the axis has to make the same calls in the same order. Do not change the inputs
    before `Work.wait` returns. If ``outputs`` is None, new tensors are allocated. Tensors that are
    passed as outputs may have any strides. The methods are not differentiable; use
    `AutogradCollectives` for gradients.

    Several tensors in one call can be faster than several calls. If all tensors are on one device,
    and the backend supports lists of tensors, the call starts:

    - One operation of the backend in total, for an all-gather or a reduce-scatter.
    - One operation per dtype, for an all-reduce.
    - One operation per tensor, for a broadcast (with every backend).

    Attributes:
        all_gather: Starts an all-gather.
        reduce_scatter: Starts a reduce-scatter.
        all_reduce: Starts an all-reduce.
        all_to_all: Starts an all-to-all of rows.
        send_recv: Starts sends and receives between pairs of ranks.
        broadcast: Starts a broadcast from one rank.

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
            outputs: Tensors ``[axis.size * n, ...]`` for the results, one for each input.

        Returns:
            A handle. Its ``wait()`` returns one tensor ``[axis.size * n, ...]`` for each input.
        """
        ...

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input over the axis, and return this rank's block of rows of the result.

        Dim 0 of the result is split into ``axis.size`` equal blocks, one for each rank in rank
        order.

        Args:
            axis: Ranks that take part.
            inputs: Tensors ``[axis.size * n, ...]``, with the same shapes on all ranks.
            outputs: Tensors ``[n, ...]`` for the results, one for each input.
            op: Reduction. As in torch, the sum of bools is True if any of them is True.

        Returns:
            A handle. Its ``wait()`` returns one tensor ``[n, ...]`` for each input.

        Raises:
            ValueError: The number of ranks does not divide dim 0 of an input.
        """
        ...

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor over the axis, in place.

        Args:
            axis: Ranks that take part.
            tensors: Inputs and outputs, with the same shapes on all ranks.
            op: Reduction. As in torch, the sum of bools is True if any of them is True.

        Returns:
            A handle. Its ``wait()`` returns ``tensors``.
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
        """Send one block of rows to each rank, and receive one block from each rank.

        Args:
            axis: Ranks that take part.
            input: Rows to send, ``[rows, ...]``. Block ``i`` goes to the rank with coordinate
                ``i`` on the axis.
            send_splits: Number of rows to send to each rank. None means equal blocks.
            receive_splits: Number of rows to receive from each rank. None means equal blocks.
            output: Tensor ``[sum(receive_splits), ...]`` for the result.

        Returns:
            A handle. Its ``wait()`` returns a list of one tensor, the received blocks in rank
            order.

        Raises:
            RuntimeError: The splits are wrong. On an axis of one rank, this is a ValueError
                instead. The cases are:

                - ``send_splits`` or ``receive_splits`` does not have one number per rank.
                - The sum of ``send_splits`` is not the number of rows of ``input``.
                - The sum of ``receive_splits`` is not the number of rows of ``output``.
                - ``send_splits`` is None, and the number of rows is not a multiple of
                  ``axis.size``.
        """
        ...

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send tensors to other ranks of the axis and receive tensors from them, point to point.

        One call can send several tensors to a peer. In its own call, the peer has to receive the
        same number of tensors, in the same order and with the same shapes and dtypes.

        Args:
            axis: Ranks among which tensors are sent.
            sends: Dict. Key: coordinate of the receiver on the axis. Value: one tensor, or a
                sequence of tensors, to send to this rank.
            receives: Dict. Key: coordinate of the sender on the axis. Value: one tensor, or a
                sequence of tensors, that the received data overwrites.

        Returns:
            A handle. Its ``wait()`` returns a list of all tensors in ``receives``, in the order of
            the dict.

        Raises:
            ValueError: Under this rank's own coordinate, ``sends`` and ``receives`` have tensors
                that differ in number, shape or dtype.

        Note:
            A rank that neither sends nor receives may omit the call, with two exceptions:

            - NCCL connects all ranks of a group in the group's first call. If this first call is a
              ``send_recv`` that one rank omits, the other ranks can wait forever. To avoid this,
              make one collective call on all ranks of the group first, such as an ``all_reduce`` of
              one element. Once per group is enough.
            - With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, the next collective over a gloo group raises
              unless all ranks have sent and received the same number of messages.
        """
        ...

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with the tensor of one rank.

        Args:
            axis: Ranks that take part.
            tensors: Tensors that the source rank sends and the other ranks overwrite, with the same
                shapes on all ranks.
            source: Coordinate of the sender on the axis.

        Returns:
            A handle. Its ``wait()`` returns ``tensors``.
        """
        ...


def as_tensors(parts: Parts) -> list[Tensor]:
    """Return one tensor, or a sequence of tensors, as a list of tensors."""
    return [parts] if isinstance(parts, Tensor) else list(parts)


def own_fault(axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> str:
    """Return an error message if the messages of this rank to itself do not match.

    The messages are the tensors under this rank's own coordinate. In ``sends`` and in ``receives``,
    they must have the same number, shapes and dtypes. If they match, or if there are no such
    messages, the result is an empty string.
    """
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
    """Return the dtypes and shapes of tensors as text, such as ``"float32 [2, 3], int64 []"``."""
    return ", ".join(f"{dtype_name(tensor)} {list(tensor.shape)}" for tensor in tensors)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")
