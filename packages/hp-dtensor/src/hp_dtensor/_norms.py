"""Clip gradients by their norm where parameters live on different meshes."""

import math
from collections.abc import Collection, Iterable
from functools import reduce
from itertools import groupby
from numbers import Real
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._errors import LayoutError, MeshError
from ._groups import axes_over, ranks_along
from ._prepare import tensor_spec
from ._torch import foreach_norms, foreach_scale, group_name, local_part, spec_of
from .collectives._c10d import TorchCollectives
from .collectives._interface import Axis, AxisMesh, Collectives
from .ragged._tensor import RaggedTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp: AxisMesh | Axis | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    The total norm is the norm of all gradients as one vector, as in
    ``torch.nn.utils.clip_grad_norm_``. Parameters may be plain tensors, DTensors and `RaggedTensor`
    on different meshes. Each element counts once, however many ranks replicate it. Rows marked by
    `mark_repeated_rows` are scaled but do not count. A NaN in any gradient makes the norm NaN on
    all ranks.

    Communicates one all-reduce of a scalar for each set of ranks over which a gradient is sharded.
    If such a set has no process group, there is one all-reduce per axis instead. One more
    all-reduce runs over ``pp``. A parameter without a gradient contributes zero, so that all ranks
    make the same calls.

    Args:
        parameters: Parameters with the gradients to scale. Duplicates count once.
        max_norm: Maximum norm: a number, or a tensor with one element. The value of a tensor is not
            read on the host, so it is not checked.
        norm_type: Order of the norm: a number above 0, or ``inf``.
        error_if_nonfinite: If True, raise if the norm is infinite or NaN.
        foreach: If False, process gradients one by one. None and True use ``torch._foreach``
            kernels.
        pp: An axis with different parameters on each rank, such as pipeline stages; or a mesh with
            one axis.
        collectives: Object that carries out the all-reduces. Defaults to `TorchCollectives`.

    Returns:
        The norm before clipping: a plain scalar tensor of at least float32, the same on every rank.

    Raises:
        ValueError: ``max_norm``, ``norm_type`` or ``collectives`` is invalid.
        LayoutError: A gradient has partial values, or the gradient of a `RaggedTensor` has repeated
            rows. Only ranks with this gradient raise; the other ranks wait in the all-reduce.
        MeshError: ``pp`` is not one axis, or an axis has no process group.
        RuntimeError: The norm is infinite or NaN and ``error_if_nonfinite`` is True. Raised on all
            ranks before scaling.

    Examples:
        >>> weight = nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(6.)
        >>> weight.grad.norm()
        tensor(1.0000)
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = 0.0
    if not order > 0:
        raise ValueError(f"norm_type={norm_type!r} is no norm; use a positive number or inf")
    carrier = TorchCollectives() if collectives is None else _checked(collectives)
    stages = None if pp is None else _stages(pp)
    limit = _limit(max_norm)
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    listed = list(given)
    # Asked of all of them: `map` makes no call in Python for each.
    unique = list(dict(zip(map(id, listed), listed, strict=True)).values())
    known: dict[tuple[object, ...], _Span] = {}
    sets: dict[frozenset[int], _RankSet] = {}
    shared, last = _RankSet([], []), None
    repeated: list[Tensor] = []
    for parameter, grad, marks in zip(
        unique, map(attrgetter("grad"), unique), map(vars, unique), strict=True
    ):
        sharded = parameter if grad is None else grad
        kind = _kind(sharded)
        if kind != last:
            last = kind
            span = known.get(kind) or known.setdefault(kind, _span(sharded))
            shared = sets.get(span.ranks) or sets.setdefault(span.ranks, _RankSet([], []))
            shared.spans.append(span)
        if grad is None:
            continue
        if not (rows := marks.get(_REPEATED_ROWS, ())):
            shared.gradients.append(_part(grad))
            continue
        counted, again = _apart(grad, frozenset(rows))
        shared.gradients.extend(counted)
        repeated.extend(again)
    sets = {ranks: _RankSet(s.spans, _joined(s.gradients)) for ranks, s in sets.items()}
    gradients = [grad for shared in sets.values() for grad in shared.gradients]
    scaled = [*gradients, *_joined(repeated)]
    dtype = _dtype([*unique, *gradients])
    # Ranks may hold gradients of different dtypes, or none: what they exchange has one dtype.
    total = torch.zeros((), dtype=torch.float64, device=_device(unique, gradients))
    # One order of the sets for all ranks: two that share two sets must not wait crosswise.
    for ranks in sorted(sets, key=sorted):
        part = _power_sum(sets[ranks].gradients, order, dtype, total, foreach is not False)
        # Two meshes may have a group each for the same ranks, which may meet them in any order.
        for axis in min(sets[ranks].spans, key=_Span.rule).axes:
            part = _over(axis, part, order, carrier)
        total = torch.maximum(total, part) if order == math.inf else total + part
    if stages is not None:
        total = _over(stages, total, order, carrier)
    norm = (total if order == math.inf else total.pow(1.0 / order)).to(dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {order} is {norm.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    if isinstance(limit, Tensor):
        limit = limit.to(norm.device)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for device in {grad.device for grad in scaled}:
        here = [grad for grad in scaled if grad.device == device]
        if foreach is not False:
            foreach_scale(here, factor.to(device))
            continue
        for grad in here:
            grad.mul_(factor.to(device))
    return norm


def mark_repeated_rows(parameter: Tensor, rows: Iterable[int]) -> None:
    """Mark rows of a parameter that repeat other rows, so that norms count each row once.

    `clip_grad_norm_` ignores the marked rows in the norm. The mark is the attribute
    ``repeated_rows`` of the parameter, an ascending tuple of indices along dim 0 of the global
    tensor. Functions that replace the parameter have to copy this attribute;
    ``hp_fsdp.fully_shard`` does. Communicates nothing.

    Args:
        parameter: A plain parameter, or a DTensor in any layout.
        rows: Indices of the rows to ignore: all but one of each set of equal rows. An empty
            sequence removes the mark.

    Raises:
        LayoutError: An index in ``rows`` is out of range.

    Examples:
        >>> weight = nn.Parameter(torch.randn(2, 3).repeat(3, 1))  # rows 2 to 5 repeat 0 and 1
        >>> mark_repeated_rows(weight, [2, 3, 4, 5])
        >>> weight.repeated_rows
        (2, 3, 4, 5)
    """
    found = tuple(sorted(set(rows)))
    number = parameter.shape[0] if parameter.ndim else 0
    strange = [row for row in found if not 0 <= row < number]
    if strange:
        raise LayoutError(
            f"rows {strange} of a parameter of shape {tuple(parameter.shape)}; its rows are the "
            f"indices along dim 0, from 0 to {number - 1}"
        )
    if found or _repeated_rows(parameter):
        vars(parameter)[_REPEATED_ROWS] = found


_REPEATED_ROWS = "repeated_rows"


def _repeated_rows(parameter: Tensor) -> tuple[int, ...]:
    """Return the rows that `mark_repeated_rows` said of ``parameter``, ascending; () without."""
    rows: tuple[int, ...] = vars(parameter).get(_REPEATED_ROWS, ())
    return rows


def _limit(max_norm: object) -> float | Tensor:
    if isinstance(max_norm, Tensor):
        if max_norm.numel() == 1 and not max_norm.is_complex():
            whole = max_norm.full_tensor() if isinstance(max_norm, DTensor) else max_norm
            return whole.detach().reshape(())
    elif isinstance(max_norm, Real) and (number := float(max_norm)) >= 0:
        return number
    raise ValueError(
        f"max_norm={max_norm!r} bounds no norm; give a number of 0 or more, inf to clip nothing, "
        "or a 0-dim tensor"
    )


class _Span(NamedTuple):
    """The ranks that hold different parts of a tensor, and axes whose all-reduces cover them."""

    ranks: frozenset[int]
    axes: tuple[Axis, ...]

    def rule(self) -> tuple[object, ...]:
        """Return by what ranks choose between spans of the same ranks: all of it is common."""
        return len(self.axes), [(axis.name, group_name(axis.group)) for axis in self.axes]


class _RankSet(NamedTuple):
    """Gradients that the same ranks shard, and the spans that say so."""

    spans: list[_Span]
    gradients: list[Tensor]


def _kind(x: Tensor) -> tuple[object, ...]:
    """Return what tensors of one span have in common: mesh and kinds of placements."""
    if not isinstance(x, (DTensor, RaggedTensor)):  # a union takes longer to ask
        return ()
    spec = spec_of(x)  # of both kinds; the properties would make two calls
    return id(spec.mesh), *map(type, spec.placements)


def _span(x: Tensor) -> _Span:
    if not isinstance(x, (DTensor, RaggedTensor)):
        return _ALONE
    mesh, placements = x.device_mesh, x.placements
    axes = tuple(axis for axis, p in enumerate(placements) if not isinstance(p, Replicate))
    if any(isinstance(placements[axis], Partial) and mesh.size(axis) > 1 for axis in axes):
        raise LayoutError(
            f"a gradient with placements {placements} is not reduced yet; redistribute it to "
            "Replicate() or Shard(dim) before clipping, or use redistribute(p, p.placements) in "
            "place of the parameter p in forward, whose gradient then comes in the layout of p"
        )
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes or mesh.get_coordinate() is None:
        return _ALONE
    return _Span(frozenset(ranks_along(mesh, axes)), axes_over(mesh, axes))


_ALONE = _Span(frozenset(), ())


_JOINED_NUMEL = 2**16  # from there on the elements cost more than the call


def _joined(gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients, small ones that lie side by side in one memory as one.

    Those of a package that reduces them together do; measuring each takes longer than its elements.
    """
    runs: list[tuple[Tensor, int]] = []  # the first gradient of a run, and how many elements it has
    room = end = 0  # elements that may be added, and the address where the next would begin
    for grad, numel, start, dense in zip(
        gradients,
        map(Tensor.numel, gradients),
        map(Tensor.data_ptr, gradients),
        map(Tensor.is_contiguous, gradients),
        strict=True,
    ):
        if not numel:
            continue
        size = grad.dtype.itemsize
        if start == end and numel <= room and dense and grad.dtype is runs[-1][0].dtype:
            first, before = runs[-1]
            runs[-1] = first, before + numel
            room, end = room - numel, end + numel * size
            continue
        runs.append((grad, numel))
        room = end = 0
        if numel < _JOINED_NUMEL and dense and type(grad) is Tensor:
            held = grad.untyped_storage().nbytes() // size - int(grad.storage_offset())
            room, end = min(held, _JOINED_NUMEL) - numel, start + numel * size
    return [
        first if numel == first.numel() else first.as_strided((numel,), (1,))
        for first, numel in runs
    ]


def _checked(collectives: object) -> Collectives:
    if isinstance(collectives, Collectives) and not isinstance(collectives, type):
        return collectives
    raise ValueError(
        f"collectives={collectives!r} lacks methods of Collectives; use TorchCollectives(), "
        "RecordingCollectives(), an object with all of its methods, or None"
    )


def _stages(pp: AxisMesh | Axis) -> Axis:
    if isinstance(pp, Axis):
        return pp
    if getattr(pp, "ndim", None) != 1:
        raise MeshError(
            f"pp={pp!r} is no axis; use an Axis or a mesh of one axis, such as mesh['pp']"
        )
    return Axis.of(pp)


def _part(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        return local_part(grad)
    return grad.to_local() if isinstance(grad, RaggedTensor) else grad


def _apart(grad: Tensor, repeated: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the rows of this rank's part that count, and those that repeat others, as views."""
    if isinstance(grad, RaggedTensor):
        raise LayoutError(
            f"a ragged gradient of shape {tuple(grad.shape)} with repeated rows; shard it with "
            "Shard(dim), or remove the mark with mark_repeated_rows(parameter, [])"
        )
    rows: list[int] = list(range(grad.shape[0]))
    if isinstance(grad, DTensor):
        coordinate = grad.device_mesh.get_coordinate()
        if coordinate is None:
            return [], []
        spec = tensor_spec(grad)
        held = spec.layout.intervals_at(spec.shape, coordinate)[0]
        rows = [row for start, stop in held for row in range(start, stop)]
    part = _part(grad)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    start = 0
    for again, run in groupby(rows, lambda row: row in repeated):
        stop = start + len(list(run))
        found[again].append(part[start:stop])
        start = stop
    return found


def _power_sum(
    gradients: list[Tensor], order: float, dtype: torch.dtype, like: Tensor, foreach: bool
) -> Tensor:
    """Return the sum of ``|x| ** order`` over all elements (the largest ``|x|`` for inf).

    Each gradient's norm is taken in ``dtype``; the result has the dtype and device of ``like``.
    """
    filled = [grad.abs() if grad.is_complex() else grad for grad in gradients if grad.numel()]
    if not filled:
        return torch.zeros_like(like)
    if foreach:
        found = foreach_norms(filled, order, dtype)
    else:
        found = [torch.linalg.vector_norm(grad, order, dtype=dtype) for grad in filled]
    norms = torch.stack([norm.to(like.device) for norm in found]).to(like)
    return norms.amax() if order == math.inf else norms.pow(order).sum()


def _over(axis: Axis, part: Tensor, order: float, carrier: Collectives) -> Tensor:
    if order != math.inf:
        (result,) = carrier.all_reduce(axis, [part], op="sum").wait()
        return result
    # The bits of numbers from 0 on, taken as integers, have the order of the numbers, with infinity
    # and then NaN last: the largest of floats loses a NaN over gloo.
    bits = torch.where(part.isnan(), math.nan, part).view(torch.int64)
    (result,) = carrier.all_reduce(axis, [bits], op="max").wait()
    return result.view(torch.float64)


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    real = {dtype.to_real() for dtype in {tensor.dtype for tensor in tensors}}
    return reduce(torch.promote_types, real, torch.float32)


def _device(parameters: list[Tensor], gradients: list[Tensor]) -> torch.device:
    return next((x.device for x in (*gradients, *parameters)), torch.device("cpu"))
