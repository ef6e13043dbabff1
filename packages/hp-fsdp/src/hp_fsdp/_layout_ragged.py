"""All parameters of a group in one buffer, split in equal shares: one all-gather, no copies."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives

from ._buffers import Buffer, Buffers, Resize, as_sent, in_own_storage
from ._layout_exact import prepared_gather
from ._offsets import ALIGNMENT, GradientRows, ShardSpec, elements_of, round_up
from ._streams import Streams, Waitable, gather_copy

TRIES = 64  # shares of one step before the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedPlan:
    """One group's buffer ``[degree * share]``; a parameter begins at ``starts[i]``, in one piece.

    Shares end between the atoms of a parameter: ``atoms[i]`` elements that stay together.
    """

    degree: int
    itemsize: int
    share: int
    shapes: tuple[tuple[int, ...], ...]
    atoms: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def shard_numel(self) -> int:
        """Return the elements per rank."""
        return self.share

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the parameters themselves."""
        return sum(map(math.prod, self.shapes)) * self.itemsize

    @property
    def padding_bytes(self) -> int:
        """Return the bytes of every gather that no parameter needs."""
        return self.degree * self.share * self.itemsize - self.parameter_bytes

    @property
    def direct(self) -> tuple[bool, ...]:
        """Return True for each parameter: all are gathered into place."""
        return (True,) * len(self.shapes)

    def span(self, position: int, index: int) -> tuple[int, int]:
        """Return which elements ``[first, end)`` of a parameter the rank at ``index`` holds."""
        start, numel = self.starts[position], math.prod(self.shapes[position])
        first = min(max(index * self.share - start, 0), numel)
        end = min(max((index + 1) * self.share - start, 0), numel)
        return first, end

    def leading(self, position: int) -> int:
        """Return how many leading dims are flattened: the fewest whose rows do not cross atoms."""
        shape, atom = self.shapes[position], self.atoms[position]
        for count in range(1, len(shape)):
            row = math.prod(shape[count:])
            if row and atom % row == 0:
                return count
        return len(shape)

    def sizes(self, position: int) -> tuple[int, ...]:
        """Return how many rows of the flattened leading dims each rank holds."""
        row = math.prod(self.shapes[position][self.leading(position) :]) or 1
        spans = [self.span(position, index) for index in range(self.degree)]
        return tuple((end - first) // row for first, end in spans)

    def held(self, position: int, index: int) -> tuple[int, tuple[int, ...]]:
        """Return where in its share the rank at ``index`` holds a parameter, and in which shape."""
        first, _ = self.span(position, index)
        start = self.starts[position] + first - index * self.share
        leading = self.leading(position)
        shape = (self.sizes(position)[index], *self.shapes[position][leading:])
        return min(max(start, 0), self.share), shape

    def rows_per_rank(self, position: int) -> int:
        """Return how many rows of the flattened leading dims a rank holds at most."""
        return max(self.sizes(position))

    def gradient_rows(self, chosen: Sequence[int], index: int) -> GradientRows:
        """Return the offsets of gradients of ``chosen``: as in the buffer, in one row.

        Parameters that several ranks have a part of leave no columns for flags between the shares.
        """
        specs = [ShardSpec(shape=self.shapes[i], dim=0, degree=1) for i in chosen]
        apart = self.degree > 1
        flags = 0 if apart else round_up(len(chosen), elements_of(ALIGNMENT, self.itemsize))
        return GradientRows.of(
            specs,
            [self.starts[i] for i in chosen],
            1,
            self.degree * self.share + flags,
            [self.held(i, index) for i in chosen],
            self.share,
            flags_apart=apart,
        )


def plan_ragged(
    shapes: Sequence[tuple[int, ...]], atoms: Sequence[int], degree: int, itemsize: int
) -> RaggedPlan:
    """Return the plan with the smallest share, of those tried, that cuts no atom.

    Shares are multiples of 16 bytes, and of the atoms of parameters longer than a share. Parameters
    keep their order; one moves up where an atom would be cut. An atom is no longer than its
    parameter.
    """
    numels = [math.prod(shape) for shape in shapes]
    atoms = [min(atom, max(numel, 1)) for atom, numel in zip(atoms, numels, strict=True)]
    unit = elements_of(ALIGNMENT, itemsize)
    least = max(-(-sum(numels) // degree), 1)
    long = {atom for atom, numel in zip(atoms, numels, strict=True) if numel > least}
    best: tuple[int, list[int]] | None = None
    for step in _steps(unit, sorted(long)):
        fits_all = all(step % atom == 0 for atom in long)  # then it will succeed in the end
        share, tries = round_up(least, step), 0
        while (best is None or share < best[0]) and (fits_all or tries < TRIES):
            starts = _place(numels, atoms, share, degree)
            if starts is not None:
                best = share, starts
            share, tries = share + round_up(max(step, share // TRIES), step), tries + 1
    share, starts = best if best is not None else (least, [])
    return RaggedPlan(
        degree=degree,
        itemsize=itemsize,
        share=share,
        shapes=tuple(shapes),
        atoms=tuple(atoms),
        starts=tuple(starts),
    )


def _steps(unit: int, atoms: Sequence[int]) -> list[int]:
    """Return of what shares may be multiples: of no atom, of one, of two, of all."""
    pairs = itertools.combinations(atoms, 2)
    chosen = [(), *((atom,) for atom in atoms), *pairs, tuple(atoms)]
    return sorted({math.lcm(unit, *each) for each in chosen})


def _place(
    numels: Sequence[int], atoms: Sequence[int], share: int, degree: int
) -> list[int] | None:
    """Return where parameters start, one after another; None if they do not fit the shares."""
    starts = []
    cursor = 0
    for numel, atom in zip(numels, atoms, strict=True):
        boundary = (cursor // share + 1) * share
        if cursor + numel > boundary:
            cursor += (boundary - cursor) % atom
            if cursor + numel > boundary + share and share % atom:
                return None
        starts.append(cursor)
        cursor += numel
    return starts if cursor <= degree * share else None


class RaggedLayout:
    """The share of one group and the buffer that it is gathered into; a `Layout`.

    Each parameter is one run of the buffer, so that nothing is moved after the all-gather.
    """

    def __init__(
        self,
        locals_: Sequence[Tensor],
        plan: RaggedPlan,
        axis: Axis,
        *,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        pinned: bool = False,
    ) -> None:
        """Copy this rank's parts (``locals_``) into a new share, of their dtype and device."""
        first = locals_[0]
        self.plan = plan
        self.specs = tuple(ShardSpec(shape=s, dim=0, degree=plan.degree) for s in plan.shapes)
        self._index = axis.index
        self.shard = torch.zeros(
            plan.share, dtype=first.dtype, device=first.device, pin_memory=pinned
        )
        held = [plan.held(position, axis.index) for position in range(len(plan.shapes))]
        self.spans = [(start, start + math.prod(shape)) for start, shape in held]
        views = [
            self.shard[start:end].view(shape)
            for (start, end), (_, shape) in zip(self.spans, held, strict=True)
        ]
        self.shards = [in_own_storage(view) for view in views]
        for view, local in zip(self.shards, locals_, strict=True):
            view.copy_(local)
        self._inputs = [as_sent(self.shard)]
        self._output: Buffer = buffers.buffer(plan.degree * plan.share, dtype, device)
        self._view(self._output.tensor)
        as_stored = first.dtype == dtype and (first.device == device or first.is_meta)
        self._sent: Buffer | None = None
        if not as_stored:
            self._sent = Resize().buffer(plan.share, dtype, device)
            self._sent.free()
        self._block: Tensor | None = None

    def _view(self, memory: Tensor) -> None:
        self.fulls = [
            memory[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.plan.starts, self.plan.shapes, strict=True)
        ]
        self._outputs = [as_sent(self._output.writable)]
        self._started_by: Collectives | None = None  # what `_start` starts the gather by
        self._memory = memory  # last: an interrupt before it lets the next gather begin again

    def gradient_rows(self, chosen: Sequence[int], itemsize: int) -> GradientRows:
        """Return the offsets of the gradients at ``chosen``: as parameters are gathered."""
        return self.plan.gradient_rows(chosen, self._index)

    @property
    def available(self) -> bool:
        """Return whether there is memory to gather into."""
        return self._output.available

    def gather(
        self, axis: Axis, collectives: Collectives, streams: Streams | None = None
    ) -> Waitable | None:
        """Start the all-gather of the share over ``axis``."""
        self._output.allocate()
        if self._output.tensor is not self._memory:
            self._renew()
        if self._sent is None:
            if self._started_by is not collectives:
                self._start = prepared_gather(collectives, axis, self._inputs, self._outputs)
                self._started_by = collectives
            self._output.lent = True
            return self._start()
        self._sent.allocate()
        self._sent.lent = True
        source = self._sent.writable
        start = partial(collectives.all_gather, axis, [as_sent(source)], self._outputs)
        if streams is not None:
            self._output.lent = True
            return gather_copy(streams.gather, source, self.shard, start)
        source.copy_(self.shard, non_blocking=True)
        self._output.lent = True
        return start()

    def _renew(self) -> None:
        with torch.inference_mode(False):
            self._view(self._output.tensor)

    def save_block(self, size: int) -> None:
        """Copy what this rank is to hold between forward and backward among ``size`` neighbours."""
        self._block = self._output.writable.view(size, -1)[self._index % size].clone()

    def gather_block(self, axis: Axis, collectives: Collectives) -> Waitable | None:
        """Start an all-gather over a smaller axis of what `save_block` copied."""
        if self._block is None:
            return None
        self._output.allocate()
        if self._output.tensor is not self._memory:
            self._renew()
        self._output.lent = True
        return collectives.all_gather(axis, [as_sent(self._block)], self._outputs)

    def drop_block(self) -> None:
        """Release what `save_block` copied."""
        self._block = None

    def wait(self, work: Waitable) -> None:
        """Wait for the all-gather; from then on its memory is used by nobody else."""
        work.wait()
        self._output.lent = False
        if self._sent is not None:
            self._sent.lent = False
            self._sent.free()

    def finish_gather(self, work: Waitable | None) -> None:
        """Do nothing: what arrived is in its place."""

    def free(self) -> None:
        """Give back the memory of the gather, or leave it to a collective that may still use it."""
        self._output.free()
        if self._sent is not None:
            self._sent.free()
