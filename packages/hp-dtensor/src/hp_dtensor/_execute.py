"""Run the steps of a plan on local tensors.

`bind` makes one function for each step of a plan, once. Each function packs the local tensor into a
buffer, runs one collective and unpacks the result; a slice step only copies. `start` runs the
functions on a local tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, permutations
from typing import TypeAlias

import torch
from torch import Tensor

from ._boxes import Box, chunk, extent, place_in, ravel, run_boxes, unravel, volume
from ._cost import Step
from ._groups import AxisGroup
from ._layout import Layout, replicated
from ._placements import Partial
from ._planner import Plan
from ._torch import counts_messages
from ._transfer import Transfer, plan_transfer
from .collectives._interface import Collectives, ReduceOp
from .collectives._uneven import start_uneven_reduce_scatter

# Waits for a collective that was started, and returns the local tensor after it.
Finish: TypeAlias = Callable[[], Tensor]
# Runs one step on a local tensor. If the step has a collective, the function starts it and returns
# its `Finish`. Otherwise the function returns the local tensor after the step.
BoundStep: TypeAlias = Callable[[Tensor, Collectives], Finish | Tensor]
Shape: TypeAlias = tuple[int, ...]
Change: TypeAlias = Callable[[Tensor], Tensor]
# Arguments of Tensor.narrow: (dim, start, length) for each dim that is narrowed.
Narrow: TypeAlias = tuple[tuple[int, int, int], ...]
# Pairs (index of the peer in the group, box). A box has one range of global indices per dim.
Pieces: TypeAlias = list[tuple[int, Box]]


def bind(plan: Plan, groups: Mapping[Step, AxisGroup]) -> tuple[BoundStep, ...]:
    """Return the functions that run a plan on the local tensor of ``plan.rank``, in order.

    There is one function for each step. Steps in which the rank takes no part are left out.
    Everything that depends only on shapes is computed here, once. The functions look up process
    groups by name, so they keep no process group alive.

    Args:
        plan: The plan of one rank.
        groups: Process group of each step that communicates.
    """
    rank = plan.rank
    steps = [
        _bound(step, plan, groups)
        for step in plan.steps
        if step.source.holds(rank) or step.target.holds(rank)
    ]
    # Plans treat a mesh axis with one rank as replicated. But a RaggedShard on this axis flattens
    # leading dims of the local tensor. So the local tensor is reshaped before the first step or
    # after the last step.
    source, target = replicated(plan.source), replicated(plan.target)
    if plan.source.ragged != source.ragged and source.holds(rank):
        steps.insert(0, _viewed(source.local_shape(plan.shape, rank)))
    if plan.target.ragged != target.ragged and target.holds(rank):
        steps.append(_viewed(plan.target.local_shape(plan.shape, rank)))
    return tuple(steps)


def start(steps: Sequence[BoundStep], local: Tensor, collectives: Collectives) -> Finish:
    """Run steps until the first collective is started. Return a function that runs the rest.

    The returned function waits for the started collective, runs the other steps and returns the
    local result. If no step copies data, the result shares memory with ``local``. Do not write to
    ``local`` before the returned function returns.
    """
    # The bytes in memory are sent, so lazy conjugation and negation are carried out first.
    result = local.detach().resolve_conj().resolve_neg()
    del local  # This reference would keep the memory of the input alive during later steps.
    for number, step in enumerate(steps, 1):
        started = step(result, collectives)
        if isinstance(started, Tensor):
            result = started
        elif number == len(steps):
            return started
        else:
            rest, pending = steps[number:], [started]
            return lambda: start(rest, pending.pop()(), collectives)()
    return lambda: result


def _bound(step: Step, plan: Plan, groups: Mapping[Step, AxisGroup]) -> BoundStep:
    if 0 in plan.shape:
        return _empty(step, plan.shape, plan.rank)
    if step.kind == "slice":
        return _slice(step, plan.shape, plan.rank)
    return _BINDERS[step.kind](step, plan.shape, plan.rank, groups[step])


def _viewed(shape: tuple[int, ...]) -> BoundStep:
    return lambda x, collectives: x.reshape(shape)


def _empty(step: Step, shape: tuple[int, ...], rank: int) -> BoundStep:
    """Return the function that runs a step on a tensor without elements.

    The function communicates nothing. It returns an empty tensor with the local shape after the
    step. If the rank is not in the target mesh, the shape is ``(0,)``.
    """
    result = step.target.local_shape(shape, rank) if step.target.holds(rank) else (0,)
    return lambda x, collectives: x.new_empty(result)


def _slice(step: Step, shape: tuple[int, ...], rank: int) -> BoundStep:
    """Return the function that runs a slice step, which copies a part of the local tensor.

    The function communicates nothing, because the rank already holds its target shard.
    """
    coordinate = step.source.coordinate(rank)
    held = LocalView(step.source, shape, coordinate)
    kept = LocalView(step.target, shape, coordinate)
    if kept.box is not None and held.box is not None:
        look = held.view(kept.box)
        return lambda x, collectives: look(x).clone(memory_format=torch.contiguous_format)
    copy_own = _own_copier(plan_transfer(step.source, step.target, shape, rank).local, held, kept)
    return lambda x, _: copy_own(x)


def _all_gather(step: Step, shape: Shape, rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that runs an all-gather of equal shards over one or several mesh axes.

    The function starts the all-gather. If the gathered shards are not consecutive rows of the
    result, they are copied into place after the all-gather.
    """
    held = step.source.local_shape(shape, rank)
    grid = []
    for axis in step.axes:
        dim = _sharded_dim(step.source, axis)
        level = step.source.shard_axes(dim).index(axis)
        grid.append((dim, step.source.mesh_shape[axis], level))
    gathered = (group.size * held[0], *held[1:])
    join = None if _is_dim_0(grid, group.order) else concatenator(held, grid, group.order)
    find = group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        out = x.new_empty(gathered)
        work = collectives.all_gather(find(), [x.contiguous()], [out])
        if join is None:
            return lambda: work.wait()[0]
        return lambda: join(work.wait()[0])

    return begin


def _all_to_all(step: Step, shape: Shape, rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that runs an all-to-all of equal blocks over one mesh axis.

    The all-to-all moves the split from one tensor dim to another. For example, the mesh axis shards
    dim 0 before the step, and dim 1 after it.
    """
    old, new = (_sharded_dim(layout, step.axes[0]) for layout in (step.source, step.target))
    held = step.source.local_shape(shape, rank)
    piece = list(held)
    piece[new] //= group.size
    split = splitter(held, [(new, group.size, 0)], group.order)
    join = concatenator(tuple(piece), [(old, group.size, 0)], group.order)
    find = group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        packed = split(x)
        work = collectives.all_to_all(find(), packed, output=torch.empty_like(packed))
        return lambda: join(work.wait()[0])

    return begin


def _all_reduce(step: Step, shape: Shape, rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that all-reduces a copy of the local tensor.

    The local tensor itself does not change.
    """
    (op, terms), find = _reduction(step), group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        own = x.clone(memory_format=torch.contiguous_format)
        work = collectives.all_reduce(find(), [own], op)
        return lambda: _averaged(work.wait()[0], terms)

    return begin


def _reduce_scatter(step: Step, shape: Shape, rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that runs a reduce-scatter.

    If the shards of the source or of the target layout have unequal shapes, the function uses an
    all-to-all and a local reduction instead.
    """
    if not (step.source.is_even(shape) and step.target.is_even(shape)):
        return _uneven_reduce_scatter(step, group)
    dim, result = _sharded_dim(step.target, step.axes[0]), step.target.local_shape(shape, rank)
    split = splitter(step.source.local_shape(shape, rank), [(dim, group.size, 0)], group.order)
    # `splitter` stacks parts along a new dim 0, except for a split of dim 0 in ascending order.
    part = result if dim == 0 and group.order is None else (1, *result)
    (op, terms), find = _reduction(step), group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        out = x.new_empty(part)
        work = collectives.reduce_scatter(find(), [split(x)], [out], op)
        return lambda: _averaged(work.wait()[0].view(result), terms)

    return begin


def _uneven_reduce_scatter(step: Step, group: AxisGroup) -> BoundStep:
    """Return the function that reduce-scatters chunks with different lengths.

    The function runs one all-to-all, and then reduces the received chunks.
    """
    dim = _sharded_dim(step.target, step.axes[0])
    degrees = [step.target.mesh_shape[axis] for axis in step.axes]
    (op, terms), find = _reduction(step), group.find
    order = group.order or range(group.size)

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        axis, length = find(), x.shape[dim]
        ranges = [chunk(length, degrees, unravel(position, degrees)) for position in order]
        parts = [x.narrow(dim, lo, hi - lo) for lo, hi in ranges]
        sizes = [part.numel() for part in parts]
        result = parts[axis.index].shape
        # Each part is contiguous in the flat buffer, so the reduced part needs no further copy.
        finish = start_uneven_reduce_scatter(collectives, axis, _joined(parts), sizes, op)
        return lambda: _averaged(finish().view(result), terms)

    return begin


def _sharded_dim(layout: Layout, axis: int) -> int:
    """Return the tensor dim that a mesh axis shards. The axis must shard exactly one dim."""
    (dim,) = layout.placements[axis].split_dims
    return dim


def _reduction(step: Step) -> tuple[ReduceOp, int]:
    """Return ``(op, divisor)`` for a step that reduces the `Partial` placements on its axes.

    ``op`` is the reduction of the collective. The result of the collective has to be divided by
    ``divisor``:

    - If all of the `Partial` placements have the same op, ``divisor`` is 1.
    - If some have ``"avg"`` and others ``"sum"``, ``op`` is ``"sum"``, and ``divisor`` is the
      number of ranks along the axes with ``"avg"``.
    """
    found: dict[ReduceOp, int] = {}
    for axis in step.axes:
        old = step.source.placements[axis]
        if isinstance(old, Partial):
            found[old.op] = found.get(old.op, 1) * step.source.mesh_shape[axis]
    if len(found) > 1:
        return "sum", found["avg"]
    return next(iter(found), "sum"), 1


def _averaged(total: Tensor, terms: int) -> Tensor:
    return total if terms == 1 else total.div_(terms)


def _direct(step: Step, shape: tuple[int, ...], rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that runs a direct step: one all-to-all with messages of any size.

    The function packs the elements to send into a flat buffer, starts the all-to-all, and unpacks
    the received elements into the result.
    """
    transfer, held, needed = _transfer_and_views(step, shape, rank)
    own_index = _group_index(step, group, rank)
    sends = sorted((_group_index(step, group, peer), box) for peer, box in transfer.sends)
    receives = sorted((_group_index(step, group, peer), box) for peer, box in transfer.recvs)
    kept = [(own_index, box) for box in transfer.local]
    # The rank does not have to send the boxes that it keeps: they are copied while the all-to-all
    # runs. But if the rank sends them to itself, one view or one copy of the received buffer can be
    # the whole result. This is faster than separate copies.
    unpack_all = _single_unpacker([box for _, box in sorted(receives + kept)], needed)
    if unpack_all is not None:
        sends, receives = sorted(sends + kept), sorted(receives + kept)
        kept = []
    splits = _split_sizes(sends, group.size), _split_sizes(receives, group.size)
    pack = packer([box for _, box in sends], held.box, held.view)
    unpack = unpacker([box for _, box in receives], needed.view)
    copy_own = _own_copier([box for _, box in kept], held, needed)
    find = group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish:
        work = collectives.all_to_all(find(), pack(x), *splits)
        if unpack_all is not None:
            return lambda: unpack_all(work.wait()[0])
        out = copy_own(x)

        def finish() -> Tensor:
            unpack(work.wait()[0], out)
            return out

        return finish

    return begin


def _transfer(step: Step, shape: tuple[int, ...], rank: int, group: AxisGroup) -> BoundStep:
    """Return the function that runs a transfer step: point-to-point messages between two meshes.

    The rank sends at most one message to each peer, and receives at most one message from each
    peer. If the rank is not in the source mesh, its input is an empty tensor. If the rank is not in
    the target mesh, its result is an empty tensor.
    """
    transfer, held, needed = _transfer_and_views(step, shape, rank)
    outgoing = _messages([(_group_index(step, group, peer), box) for peer, box in transfer.sends])
    incoming = _messages([(_group_index(step, group, peer), box) for peer, box in transfer.recvs])
    # Peers that receive the same boxes share one buffer.
    parts = list(dict.fromkeys(outgoing.values()))
    sizes = [_size(boxes) for boxes in parts]
    pack = packer([box for boxes in parts for box in boxes], held.box, held.view)
    received_sizes = [_size(boxes) for boxes in incoming.values()]
    unpack = unpacker([box for boxes in incoming.values() for box in boxes], needed.view)
    copy_own, find = _own_copier(transfer.local, held, needed), group.find

    def begin(x: Tensor, collectives: Collectives) -> Finish | Tensor:
        axis = find()
        if counts_messages(axis.group, x.device):
            # This backend requires that all ranks of the group make the same calls, so the messages
            # are sent by one all-to-all.
            return _direct(step, shape, rank, group)(x, collectives)
        out = copy_own(x)
        if not outgoing and not incoming:
            return out
        packed = dict(zip(parts, pack(x).split(sizes) if parts else (), strict=True))
        received = x.new_empty(sum(received_sizes))
        work = collectives.send_recv(
            axis,
            {peer: packed[boxes] for peer, boxes in outgoing.items()},
            dict(zip(incoming, received.split(received_sizes), strict=True)),
        )

        def finish() -> Tensor:
            work.wait()
            unpack(received, out)
            return out

        return finish

    return begin


def _own_copier(boxes: Sequence[Box], held: "LocalView", needed: "LocalView") -> Change:
    """Return a function that copies ``boxes`` from the local tensor to a new local result.

    The other elements of the result are uninitialized.

    Args:
        boxes: Regions of the global tensor that the rank holds before and after the step.
        held: Describes the local tensor before the step.
        needed: Describes the local tensor after the step.
    """
    views = [(held.view(box), needed.view(box)) for box in boxes]

    def copy(x: Tensor) -> Tensor:
        out = x.new_empty(needed.shape)
        for source, target in views:
            target(out).copy_(source(x))
        return out

    return copy


def _transfer_and_views(
    step: Step, shape: tuple[int, ...], rank: int
) -> "tuple[Transfer, LocalView, LocalView]":
    """Return ``(transfer, held, needed)`` for one rank and one step.

    ``transfer`` has the messages of the rank. ``held`` describes its local tensor before the step,
    and ``needed`` its local tensor after the step.
    """
    held, needed = (
        LocalView(layout, shape, layout.coordinate(rank) if layout.holds(rank) else None)
        for layout in (step.source, step.target)
    )
    return plan_transfer(step.source, step.target, shape, rank), held, needed


def _group_index(step: Step, group: AxisGroup, rank: int) -> int:
    """Return the index of a rank in the process group of a step.

    ``rank`` is the number of the rank in the plan. In a plan on one mesh, this is the row-major
    position of the rank in the mesh. In a plan between two meshes, it is the global rank.
    """
    if step.kind == "transfer":
        return group.members[rank]
    position, degrees = step.source.coordinate(rank), step.source.mesh_shape
    axes = step.axes
    return group.members[ravel([position[a] for a in axes], [degrees[a] for a in axes])]


def _single_unpacker(received: Sequence[Box], needed: "LocalView") -> Change | None:
    """Return a function that turns the received buffer into the local result.

    The function makes one view or one copy of the buffer. Returns None if this is not enough.

    Args:
        received: Boxes whose elements lie one after another in the flat buffer.
        needed: Describes the local result.
    """
    if needed.box is None:
        return None
    if fills(received, needed.box):
        return lambda x: x.view(needed.shape)
    grid = equal_grid(received, needed.box)
    return None if grid is None else concatenator(extent(received[0]), grid)


def _split_sizes(pieces: Pieces, size: int) -> list[int]:
    splits = [0] * size
    for index, box in pieces:
        splits[index] += volume(box)
    return splits


def _messages(pieces: Pieces) -> dict[int, tuple[Box, ...]]:
    """Group ``(peer, box)`` pairs by peer.

    ``peer`` is the index of a rank in the process group. Returns a dict from each peer to its
    boxes, in ascending order of peers.
    """
    return {
        peer: tuple(box for _, box in group)
        for peer, group in groupby(sorted(pieces), key=lambda piece: piece[0])
    }


def _size(boxes: Sequence[Box]) -> int:
    return sum(volume(box) for box in boxes)


_BINDERS = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "direct": _direct,
    "reduce_scatter": _reduce_scatter,
    "transfer": _transfer,
}


class LocalView:
    """Finds the elements of the local tensor of one rank by their global indices.

    A box is a rectangular region of the global tensor: one half-open range of global indices per
    dim. The method `view` finds the elements of a box.

    Args:
        layout: Layout of the tensor.
        shape: Global shape.
        coordinate: Coordinate of the rank in the mesh. None for a rank outside the mesh, whose
            local tensor is empty.

    Attributes:
        shape: Shape of the local tensor.
        box: The box that the local tensor covers. It can be empty. It is None if ``coordinate`` is
            None. It is also None if the layout has a `StridedShard` or a `RaggedShard`, because the
            rank can then hold several boxes.
    """

    def __init__(
        self, layout: Layout, shape: Sequence[int], coordinate: Sequence[int] | None
    ) -> None:
        self.shape: Shape = (0,)
        self.box: Box | None = None
        if coordinate is None:
            return
        if layout.is_plain:
            self.box = layout.box_at(shape, coordinate)
        # Number of leading dims that a RaggedShard flattens. 0 if there is no RaggedShard.
        self._leading = 0
        # The boxes of these leading dims, each with its offset in the flattened dim.
        self._runs: list[tuple[Box, int]] = []
        # For each dim, tuples (start, stop, offset): a range of global indices, and its offset in
        # the local tensor.
        self._ranges: list[list[tuple[int, int, int]]] = []
        lengths = []
        for ranges in layout.intervals_at(shape, coordinate):
            placed, place = [], 0
            for lo, hi in ranges:
                placed.append((lo, hi, place))
                place += hi - lo
            self._ranges.append(placed)
            lengths.append(place)
        if layout.ragged is not None:
            self._leading = len(layout.ragged[1].dims)
            start, stop = layout.run_at(coordinate)
            self._place_runs(start, stop)
            lengths[: self._leading] = [stop - start]
        self.shape = tuple(lengths)

    def _place_runs(self, start: int, stop: int) -> None:
        if not all(self._ranges[: self._leading]):
            return
        frame = tuple((ranges[0][0], ranges[0][1]) for ranges in self._ranges[: self._leading])
        place = 0
        for box in run_boxes(frame, start, stop):
            self._runs.append((box, place))
            place += volume(box)

    def view(self, box: Box) -> Change:
        """Return a function from the local tensor to a view of the elements of ``box``.

        ``box`` has one range of global indices per dim. It has to lie within one of the boxes that
        the rank holds. The view has the shape of ``box``.
        """
        if self.box is not None:
            part = within(box, self.box)
            return lambda x: narrowed(x, part)
        moved = 1 - self._leading if self._leading else 0
        cuts = []
        for dim in range(self._leading, len(box)):
            lo, hi = box[dim]
            start, place = next(
                (start, place) for start, stop, place in self._ranges[dim] if start <= lo < stop
            )
            cuts.append((dim + moved, place + lo - start, hi - lo))
        if not self._leading:
            return lambda x: narrowed(x, tuple(cuts))
        lead = box[: self._leading]
        run, first = next((run, place) for run, place in self._runs if _inside(lead, run))
        lengths, count, inner = extent(run), volume(run), within(lead, run)

        def look(x: Tensor) -> Tensor:
            rows = narrowed(x, tuple(cuts)).narrow(0, first, count)
            return narrowed(rows.view(*lengths, *rows.shape[1:]), inner)

        return look


def _inside(box: Box, frame: Box) -> bool:
    return all(
        start <= lo and hi <= stop for (lo, hi), (start, stop) in zip(box, frame, strict=True)
    )


# Describes how to split a tensor into equal parts. Each entry (dim, number of parts, level) splits
# one dim. Parts are numbered in row-major order of the entries. If a dim has several entries, the
# entry with level 0 splits the dim first. Example: [(1, 2, 0)] splits a [6, 4] tensor into part 0,
# its columns 0 and 1, and part 1, its columns 2 and 3.
Grid: TypeAlias = Sequence[tuple[int, int, int]]


def splitter(shape: Shape, grid: Grid, order: Sequence[int] | None = None) -> Change:
    """Return a function that splits a tensor into equal parts, one after another in memory.

    For example, the grid ``[(1, 2, 0)]`` splits a ``[6, 4]`` tensor into a contiguous
    ``[2, 6, 2]`` tensor: first columns 0 and 1, then columns 2 and 3.

    Args:
        shape: Shape of the tensor.
        grid: Entries ``(dim, number of parts, level)``; see `Grid`. Parts are numbered in row-major
            order of the entries.
        order: ``order[i]`` is the number of the part at position ``i`` of the result. None means
            ascending order.

    Returns:
        The function. Its result is contiguous and has one of these shapes:

        - If ``order`` is given: ``[number of parts, *shape of a part]``.
        - If ``order`` is None: one leading dim for each grid entry, then the dims of a part.
        - If ``order`` is None and dim 0 has the only grid entry: the shape of the tensor.
    """
    if _is_dim_0(grid, order):
        return Tensor.contiguous
    part = list(shape)
    for dim, number, _ in grid:
        part[dim] //= number
    _, stacked, sizes = _grid_dims(part, grid)
    if order is None:
        return lambda x: x.reshape(sizes).permute(stacked).contiguous()
    indices = [unravel(number, [parts for _, parts, _ in grid]) for number in order]

    def stack(x: Tensor) -> Tensor:
        parts = x.reshape(sizes).permute(stacked)
        return torch.stack([parts[index] for index in indices])

    return stack


def concatenator(part: Shape, grid: Grid, order: Sequence[int] | None = None) -> Change:
    """Return the inverse of `splitter`: a function that joins equal parts into one tensor.

    The input of the returned function is a contiguous tensor of any shape. It holds the parts one
    after another.

    Args:
        part: Shape of one part.
        grid: Entries ``(dim, number of parts, level)``, as in `splitter`.
        order: ``order[i]`` is the number of the part at position ``i`` of the input. None means
            ascending order.
    """
    whole = list(part)
    for dim, number, _ in grid:
        whole[dim] *= number
    if _is_dim_0(grid, order):
        return lambda x: x.view(whole)
    apart, stacked, sizes = _grid_dims(part, grid)
    degrees = [number for _, number, _ in grid]
    if order is None:
        return lambda x: x.view(*degrees, *part).permute(apart).reshape(whole).contiguous()
    indices = [unravel(number, degrees) for number in order]

    def join(x: Tensor) -> Tensor:
        out = x.new_empty(sizes)
        parts = out.permute(stacked)
        for index, received in zip(indices, x.view(-1, *part), strict=True):
            parts[index].copy_(received)
        return out.view(whole)

    return join


def _is_dim_0(grid: Grid, order: Sequence[int] | None) -> bool:
    return order is None and [dim for dim, _, _ in grid] == [0]


def _grid_dims(part: Sequence[int], grid: Grid) -> tuple[list[int], list[int], list[int]]:
    """Return the permutations between two views of a tensor that a grid splits into parts.

    Example: the grid ``[(1, 2, 0)]`` splits a ``[6, 4]`` tensor into 2 parts of shape ``[6, 2]``.

    - The stacked view has the shape ``[2, 6, 2]``. The dims of the grid entries come first.
    - The split view has the shape ``[6, 2, 2]``. The dim of a grid entry comes directly before the
      dim that the entry splits. This shape needs no copy of a contiguous tensor.

    Args:
        part: Shape of one part.
        grid: Entries ``(dim, number of parts, level)``; see `Grid`.

    Returns:
        The permutation of dims from the stacked view to the split view, the inverse permutation,
        and the shape of the split view.
    """
    apart: list[int] = []
    for dim in range(len(part)):
        levels = sorted((level, i) for i, (split, _, level) in enumerate(grid) if split == dim)
        apart += [*(i for _, i in levels), len(grid) + dim]
    lengths = [*(number for _, number, _ in grid), *part]
    inverse = sorted(range(len(apart)), key=apart.__getitem__)
    return apart, inverse, [lengths[i] for i in apart]


def packer(boxes: Sequence[Box], frame: Box | None, view: Callable[[Box], Change]) -> Change:
    """Return a function that packs boxes of a local tensor into one flat buffer.

    The buffer can share memory with the tensor.

    Args:
        boxes: Boxes to pack, in order. A box has one range ``(start, stop)`` of global indices per
            dim.
        frame: The box that the tensor covers. None if the tensor covers several boxes.
        view: ``view(box)`` returns a function from the tensor to a view of the elements of ``box``;
            see `LocalView.view`.
    """
    if frame is not None and fills(boxes, frame):
        return lambda x: x.reshape(-1)
    if frame is not None and (grid := equal_grid(boxes, frame)) is not None:
        split = splitter(extent(frame), grid)
        return lambda x: split(x).view(-1)
    views = [view(box) for box in boxes]
    shapes = [extent(box) for box in boxes]
    if not views:
        return lambda x: x.new_empty(0)
    if len(set(shapes)) == 1:
        # Stacking copies once. Flattening the pieces before concatenating them copies twice.
        return lambda x: torch.stack([look(x) for look in views]).view(-1)
    return lambda x: _joined([look(x) for look in views])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Copy tensors one after the other into one new flat buffer. Each tensor is copied once."""
    sizes = [part.numel() for part in parts]
    buffer = parts[0].new_empty(sum(sizes))
    for space, part in zip(buffer.split(sizes), parts, strict=True):
        space.view(part.shape).copy_(part)
    return buffer


def unpacker(
    boxes: Sequence[Box], view: Callable[[Box], Change]
) -> Callable[[Tensor, Tensor], None]:
    """Return a function ``unpack(buffer, out)`` that copies boxes from a flat buffer into ``out``.

    ``buffer`` holds the elements of ``boxes`` one after another. ``out`` is a local tensor.

    Args:
        boxes: Boxes in the buffer, in order. A box has one range ``(start, stop)`` of global
            indices per dim.
        view: ``view(box)`` returns a function from ``out`` to a view of the elements of ``box``;
            see `LocalView.view`.
    """
    views = [view(box) for box in boxes]
    shapes = [extent(box) for box in boxes]
    sizes = [math.prod(shape) for shape in shapes]

    def unpack(buffer: Tensor, out: Tensor) -> None:
        for space, shape, look in zip(buffer.split(sizes), shapes, views, strict=True):
            look(out).copy_(space.view(shape))

    return unpack if boxes else lambda buffer, out: None


def narrowed(x: Tensor, arguments: Narrow) -> Tensor:
    """Apply ``x.narrow(dim, start, length)`` for each tuple in ``arguments``. Return the view."""
    for dim, start, length in arguments:
        x = x.narrow(dim, start, length)
    return x


def within(box: Box, frame: Box) -> Narrow:
    """Return the arguments for `narrowed` that select ``box`` from a tensor that covers ``frame``.

    Both have one range ``(start, stop)`` of global indices per dim. The result has one tuple
    ``(dim, start, length)`` for each dim in which ``box`` is smaller than ``frame``. Its ``start``
    is relative to the start of ``frame``.
    """
    return tuple(
        (dim, lo - start, hi - lo)
        for dim, ((lo, hi), (start, end)) in enumerate(zip(box, frame, strict=True))
        if (lo, hi) != (start, end)
    )


def fills(boxes: Sequence[Box], frame: Box) -> bool:
    """Return whether a flat buffer of ``boxes`` is a contiguous tensor that covers ``frame``.

    The flat buffer has the elements of ``boxes`` one after another. ``frame`` and each box have one
    range ``(start, stop)`` of global indices per dim. For example, rows 0 and 1 followed by row 2
    fill a frame of rows 0 to 2.
    """
    offset = 0
    for box in boxes:
        if place_in(frame, [lo for lo, _ in box]) != offset or not _is_contiguous(box, frame):
            return False
        offset += volume(box)
    return bool(boxes) and bool(frame) and offset == volume(frame)


def equal_grid(boxes: Sequence[Box], frame: Box) -> Grid | None:
    """Return the `Grid` that splits the box ``frame`` into ``boxes``, in the same order.

    A box has one range ``(start, stop)`` of global indices per dim. Returns None if no grid splits
    ``frame`` into these boxes.
    """
    if not boxes or not volume(frame):
        return None
    part = extent(boxes[0])
    if any(extent(box) != part for box in boxes) or 0 in part:
        return None
    if any(length % size for length, size in zip(extent(frame), part, strict=True)):
        return None
    counts = [length // size for length, size in zip(extent(frame), part, strict=True)]
    split = [dim for dim, number in enumerate(counts) if number > 1]
    if math.prod(counts) != len(boxes):
        return None
    for dims in permutations(split):
        degrees = [counts[dim] for dim in dims]
        if all(
            _part_at(frame, part, dims, unravel(number, degrees)) == box
            for number, box in enumerate(boxes)
        ):
            return [(dim, number, 0) for dim, number in zip(dims, degrees, strict=True)]
    return None


def _part_at(frame: Box, part: Shape, dims: Sequence[int], index: Sequence[int]) -> Box:
    """Return the box of one part of a grid that splits the box ``frame`` into equal parts.

    Args:
        frame: One range ``(start, stop)`` of global indices per dim.
        part: Shape of each part.
        dims: Dims that the grid splits.
        index: Position of the part on each dim of ``dims``, from 0.
    """
    box = list(frame)
    for dim, number in zip(dims, index, strict=True):
        start = frame[dim][0] + number * part[dim]
        box[dim] = start, start + part[dim]
    return tuple(box)


def _is_contiguous(box: Box, frame: Box) -> bool:
    """Return whether the elements of ``box`` are contiguous in a tensor that covers ``frame``."""
    whole = True
    for interval, full in zip(reversed(box), reversed(frame), strict=True):
        if not whole and interval[1] - interval[0] != 1:
            return False
        whole = whole and interval == full
    return True
