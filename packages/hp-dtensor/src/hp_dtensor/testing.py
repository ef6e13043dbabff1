"""Tools for tests of distributed code.

`SimulatedWorld` runs ranks as threads of one process. `compare_with_one_process` compares a
parallelized model with the same model in one process.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ._compare import Comparison as Comparison
from ._compare import compare_with_one_process as compare_with_one_process
from ._compare import keep_float64 as keep_float64
from ._cost import clear_caches as clear_caches
from .collectives._interface import (
    Axis,
    Parts,
    RankMismatchError,
    ReduceOp,
    Work,
    as_tensors,
    check_divisible,
    described,
    own_fault,
)

__all__ = [
    "Comparison",
    "SimulatedCollectives",
    "SimulatedGroup",
    "SimulatedMesh",
    "SimulatedWorld",
    "clear_caches",
    "compare_with_one_process",
    "keep_float64",
]


class SimulatedGroup:
    """A simulated process group. Each of its ranks has its own object.

    The group has no collectives. `SimulatedCollectives` communicates between simulated ranks.

    Args:
        ranks: Global ranks of the group, including ``me``.
        me: Global rank of the rank that uses this object.

    Examples:
        >>> SimulatedGroup((4, 5, 6), me=5).rank()
        1
    """

    def __init__(self, ranks: tuple[int, ...], me: int) -> None:
        self.ranks = ranks
        self._index = ranks.index(me)

    def rank(self) -> int:
        """Return the index of this rank in the group.

        Returns:
            The index, from 0.
        """
        return self._index

    def size(self) -> int:
        """Return the number of ranks in the group.

        Returns:
            The number of ranks.
        """
        return len(self.ranks)


class SimulatedMesh:
    """An `AxisMesh` of simulated ranks. Each of these ranks has its own object.

    Args:
        shape: Number of ranks on each axis.
        names: Names of the axes.
        me: Global rank of the rank that uses this object. It has to be one of ``ranks``.
        ranks: Global ranks of the mesh, in row-major order.

    Raises:
        ValueError: The product of ``shape`` is not the number of ranks.

    Examples:
        >>> SimulatedMesh((2, 2), ("dp", "tp"), me=3, ranks=range(4)).get_local_rank("dp")
        1
    """

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], me: int, ranks: Sequence[int]
    ) -> None:
        if math.prod(shape) != len(ranks):
            raise ValueError(f"a mesh of shape {tuple(shape)} does not hold {len(ranks)} ranks")
        self.mesh = torch.tensor(list(ranks)).view(*shape)
        self.mesh_dim_names: tuple[str, ...] | None = tuple(names)
        self.device_type = "cpu"
        self._me = me
        self._coordinate = [int(i) for i in (self.mesh == me).nonzero()[0]]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks on one axis, or in the whole mesh.

        Args:
            mesh_dim: Position of the axis. None means the whole mesh.

        Returns:
            The number of ranks.
        """
        return self.mesh.numel() if mesh_dim is None else self.mesh.shape[mesh_dim]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the coordinate of this rank on one axis.

        Args:
            mesh_dim: Position or name of the axis. May be None if the mesh has one axis.

        Returns:
            The coordinate, from 0.
        """
        return self._coordinate[self._position(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> SimulatedGroup:
        """Return the simulated process group of this rank along one axis.

        Args:
            mesh_dim: Position or name of the axis. May be None if the mesh has one axis.

        Returns:
            The group of the ranks along the axis, including this rank.
        """
        return SimulatedGroup(tuple(self._line(self._position(mesh_dim)).tolist()), self._me)

    def __getitem__(self, name: str) -> "SimulatedMesh":
        line = self._line(self._position(name)).tolist()
        return SimulatedMesh((len(line),), (name,), self._me, line)

    def _line(self, position: int) -> Tensor:
        index: list[Any] = list(self._coordinate)
        index[position] = slice(None)
        return self.mesh[tuple(index)]

    def _position(self, mesh_dim: int | str | None) -> int:
        if isinstance(mesh_dim, str):
            return cast(tuple[str, ...], self.mesh_dim_names).index(mesh_dim)
        if mesh_dim is None and self.ndim > 1:
            raise RuntimeError("name the axis of a mesh with several axes")
        return mesh_dim or 0


T = TypeVar("T")
Ranks = tuple[int, ...]
# The key of a message: ranks of the axis, coordinate of the sender, coordinate of the receiver, and
# number of the message from this sender to this receiver, from 0.
_MessageKey = tuple[Ranks, int, int, int]


class SimulatedWorld:
    """Ranks as threads of one process, for tests of code that communicates.

    As in a real process group, all ranks have to make the same calls. Code does not hang if ranks
    make different calls, or if a rank ends while another rank waits for it. Instead, `run` raises
    an error that names the ranks.

    Args:
        size: Number of ranks.
        timeout: Seconds that a rank waits for the other ranks of a call. Defaults to 60.

    Raises:
        ValueError: ``size`` is below 1.

    Examples:
        >>> def total(rank, collectives):
        ...     (result,) = collectives.all_reduce(collectives.axis(), [torch.tensor(rank)]).wait()
        ...     return result.item()
        >>> SimulatedWorld(4).run(total)
        [6, 6, 6, 6]
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"a world has at least one rank, got size={size}")
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._ended: set[int] = set()
        self._meetings: dict[tuple[Ranks, int], _Meeting] = {}
        self._messages: dict[_MessageKey, Tensor] = {}

    def run(self, function: Callable[[int, "SimulatedCollectives"], T]) -> list[T]:
        """Call a function on every rank and return the results.

        Each rank is a thread. If ranks raise errors, this method raises the error of the lowest of
        these ranks. A `RankMismatchError` is raised only if there is no other error, because it is
        often only a consequence of the other error.

        Args:
            function: Called as ``function(rank, collectives)``. ``collectives`` is the
                `SimulatedCollectives` of the rank.

        Returns:
            The result of each rank, in rank order.
        """
        self._ended.clear()
        self._meetings.clear()
        self._messages.clear()
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def main(rank: int) -> None:
            try:
                results[rank] = function(rank, SimulatedCollectives(self, rank))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors[rank] = error
            finally:
                with self._changed:
                    self._ended.add(rank)
                    self._changed.notify_all()

        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in sorted(errors, key=lambda r: (isinstance(errors[r], RankMismatchError), r)):
            raise errors[rank]
        return [results[rank] for rank in range(self.size)]

    def _wait_for(
        self, ready: Callable[[], bool], peers: Callable[[], set[int]], what: str
    ) -> None:
        with self._changed:
            while not ready():
                if gone := peers() & self._ended:
                    raise RankMismatchError(
                        f"ranks {sorted(gone)} ended without taking part in {what}"
                    )
                if not self._changed.wait(self.timeout):
                    raise RankMismatchError(
                        f"{what} waited {self.timeout} s for ranks {sorted(peers())}"
                    )


@dataclass
class _Meeting:
    """One collective call of all ranks of an axis. The last rank that calls computes the results.

    Attributes:
        call: Description of the call, from the first rank that made the call.
        posted: Input tensors of each rank, by coordinate on the axis.
        results: Output tensors of each rank, by coordinate on the axis. Empty until the last rank
            has made the call.
        error: Error message, if the calls differ or the inputs cannot be combined; otherwise None.
    """

    call: str
    posted: dict[int, list[Tensor]] = field(default_factory=dict)
    results: dict[int, list[Tensor]] = field(default_factory=dict)
    error: str | None = None


class SimulatedCollectives:
    """The `Collectives` of one rank of a `SimulatedWorld`.

    `SimulatedWorld.run` creates one object for each rank and passes it to the function. Reductions
    combine the tensors in rank order, so the results are deterministic.

    Args:
        world: The simulated world.
        rank: Global rank that uses this object.

    Examples:
        >>> def coordinate(rank, collectives):
        ...     return collectives.mesh((2, 2), ("dp", "tp")).get_local_rank("tp")
        >>> SimulatedWorld(4).run(coordinate)
        [0, 1, 0, 1]
    """

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        # Counters of the calls on each axis, and of the messages to and from each peer on an axis.
        self._calls: defaultdict[Ranks, count[int]] = defaultdict(count)
        self._sent: defaultdict[tuple[Ranks, int], count[int]] = defaultdict(count)
        self._received: defaultdict[tuple[Ranks, int], count[int]] = defaultdict(count)

    def axis(self, name: str = "world", ranks: Sequence[int] | None = None) -> Axis:
        """Return an axis over all or some ranks of the simulated world.

        Args:
            name: Name of the axis.
            ranks: Global ranks of the axis, including this rank. Defaults to all ranks of the
                world.

        Returns:
            The axis of this rank. ``axis.index`` is this rank's position in ``ranks``.
        """
        ranks = tuple(range(self._world.size) if ranks is None else ranks)
        return Axis(name, SimulatedGroup(ranks, self.rank), ranks)

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> SimulatedMesh:
        """Return a mesh of all ranks of the simulated world, in row-major order.

        Args:
            shape: Number of ranks on each axis.
            names: Names of the axes.

        Returns:
            The mesh object of this rank.
        """
        return SimulatedMesh(shape, names, self.rank, range(self._world.size))

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Concatenate each input over the axis; see `Collectives.all_gather`."""

        def gather(posted: list[list[Tensor]]) -> list[list[Tensor]]:
            whole = [torch.cat(parts) for parts in zip(*posted, strict=True)]
            return [whole for _ in posted]

        return self._meet(axis, f"all_gather {described(inputs)}", inputs, gather, outputs)

    def reduce_scatter(
        self,
        axis: Axis,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        op: ReduceOp = "sum",
    ) -> Work:
        """Reduce each input and return this rank's block; see `Collectives.reduce_scatter`."""
        check_divisible(axis, inputs)

        def scatter(posted: list[list[Tensor]]) -> list[list[Tensor]]:
            totals = [_reduce(parts, op) for parts in zip(*posted, strict=True)]
            chunks = [total.tensor_split(axis.size) for total in totals]
            return [[chunk[i] for chunk in chunks] for i in range(axis.size)]

        return self._meet(
            axis, f"reduce_scatter {op} {described(inputs)}", inputs, scatter, outputs
        )

    def all_reduce(self, axis: Axis, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> Work:
        """Reduce each tensor in place; see `Collectives.all_reduce`."""

        def reduce(posted: list[list[Tensor]]) -> list[list[Tensor]]:
            totals = [_reduce(parts, op) for parts in zip(*posted, strict=True)]
            return [totals for _ in posted]

        return self._meet(axis, f"all_reduce {op} {described(tensors)}", tensors, reduce, tensors)

    def all_to_all(
        self,
        axis: Axis,
        input: Tensor,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Work:
        """Send one block of rows to each rank; see `Collectives.all_to_all`."""
        if send_splits is None:
            send_splits = [input.shape[0] // axis.size] * axis.size
        blocks = list(input.split(list(send_splits)))

        def transpose(posted: list[list[Tensor]]) -> list[list[Tensor]]:
            received = []
            for me, blocks in enumerate(zip(*posted, strict=True)):
                # Real backends ignore the row shape of a rank that sends no rows, so this does too.
                sent = [block for block in blocks if len(block)]
                received.append([torch.cat([blocks[me][:0], *sent])])
            return received

        def check(result: list[Tensor], posted: list[list[Tensor]]) -> None:
            got = tuple(blocks[axis.index].shape[0] for blocks in posted)
            if receive_splits is not None and got != tuple(receive_splits):
                raise RankMismatchError(
                    f"rank {self.rank} expects {tuple(receive_splits)} rows over {axis.name}, "
                    f"its peers sent {got}"
                )

        return self._meet(
            axis,
            f"all_to_all {input.dtype}",
            blocks,
            transpose,
            None if output is None else [output],
            check,
        )

    def send_recv(
        self, axis: Axis, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
    ) -> Work:
        """Send tensors to ranks and receive tensors from ranks; see `Collectives.send_recv`."""
        if fault := own_fault(axis, sends, receives):
            raise ValueError(fault)
        world, ranks, me = self._world, axis.ranks, axis.index
        with world._changed:
            for peer, parts in sends.items():
                for tensor in as_tensors(parts):
                    number = next(self._sent[ranks, peer])
                    world._messages[ranks, me, peer, number] = tensor.detach().clone()
            world._changed.notify_all()
        awaited = [
            (out, (ranks, peer, me, next(self._received[ranks, peer])))
            for peer, parts in receives.items()
            for out in as_tensors(parts)
        ]

        def finish() -> list[Tensor]:
            for out, key in awaited:
                self._receive(axis, out, key)
            return [out for out, _ in awaited]

        return _Deferred(finish)

    def _receive(self, axis: Axis, output: Tensor, key: _MessageKey) -> None:
        world, sender = self._world, axis.ranks[key[1]]
        world._wait_for(
            lambda: key in world._messages, lambda: {sender}, f"send_recv over {axis.name}"
        )
        message = world._messages.pop(key)
        if (message.dtype, message.shape) != (output.dtype, output.shape):
            raise RankMismatchError(
                f"rank {sender} sent {described([message])} over {axis.name} "
                f"where rank {self.rank} expects {described([output])}"
            )
        output.detach().copy_(message)

    def broadcast(self, axis: Axis, tensors: Sequence[Tensor], source: int = 0) -> Work:
        """Overwrite each tensor with the tensor of one rank; see `Collectives.broadcast`."""

        def spread(posted: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[tensor.clone() for tensor in posted[source]] for _ in posted]

        call = f"broadcast from {source} {described(tensors)}"
        return self._meet(axis, call, tensors, spread, tensors)

    def _meet(
        self,
        axis: Axis,
        call: str,
        inputs: Sequence[Tensor],
        combine: Callable[[list[list[Tensor]]], list[list[Tensor]]],
        outputs: Sequence[Tensor] | None,
        check: Callable[[list[Tensor], list[list[Tensor]]], None] | None = None,
    ) -> Work:
        world = self._world
        key = (axis.ranks, next(self._calls[axis.ranks]))
        with world._changed:
            meeting = world._meetings.setdefault(key, _Meeting(call))
            if meeting.call != call and meeting.error is None:
                meeting.error = (
                    f"over {axis.name}, rank {self.rank} calls {call} "
                    f"where another rank calls {meeting.call}"
                )
            meeting.posted[axis.index] = [tensor.detach() for tensor in inputs]
            if len(meeting.posted) == axis.size:
                del world._meetings[key]  # ranks that still wait keep references to the object
            if len(meeting.posted) == axis.size and meeting.error is None:
                posted = [meeting.posted[i] for i in range(axis.size)]
                try:
                    with torch.no_grad():
                        for i, result in enumerate(combine(posted)):
                            meeting.results[i] = [tensor.clone() for tensor in result]
                except RuntimeError as error:
                    meeting.error = f"{call} over {axis.name} cannot be combined: {error}"
            world._changed.notify_all()

        def missing() -> set[int]:
            return {rank for i, rank in enumerate(axis.ranks) if i not in meeting.posted}

        def finish() -> list[Tensor]:
            world._wait_for(
                lambda: bool(meeting.results) or meeting.error is not None, missing, call
            )
            if meeting.error is not None:
                raise RankMismatchError(meeting.error)
            result = meeting.results[axis.index]
            if check is not None:
                check(result, [meeting.posted[i] for i in range(axis.size)])
            if outputs is None:
                return result
            for output, tensor in zip(outputs, result, strict=True):
                output.detach().copy_(tensor.view(output.shape))
            return list(outputs)

        return _Deferred(finish)


class _Deferred:
    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish: Callable[[], list[Tensor]] | None = finish
        self._outputs: list[Tensor] = []
        self._error: Exception | None = None

    def wait(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._outputs = finish()
            except Exception as error:
                self._error = error
                raise
        return self._outputs


def _reduce(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    total = reduce(_PAIRS[op], parts[1:], parts[0].clone())
    return total / len(parts) if op == "avg" else total


_PAIRS: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
