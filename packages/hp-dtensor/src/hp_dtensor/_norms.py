"""Clip gradients by their total norm, also if parameters are on different meshes."""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from itertools import groupby
from numbers import Real
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._errors import LayoutError, MeshError
from ._groups import axes_over, ranks_along
from ._torch import foreach_norms, foreach_scale, group_name, spec_of
from .checkpoint import local_boxes
from .collectives._c10d import checked_collectives
from .collectives._interface import Axis, AxisMesh, Collectives
from .ragged._reductions import largest_over
from .ragged._tensor import RaggedTensor, local_tensor_of, mesh_and_placements


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
    on different meshes.

    - The norm includes each element once, even if several ranks hold it.
    - Rows marked by `mark_repeated_rows` are scaled, but the norm ignores them.
    - A NaN in any gradient makes the norm NaN on all ranks.
    - A parameter without a gradient contributes zero, so that all ranks make the same calls.

    Communicates one all-reduce of a scalar for each set of ranks over which a gradient is sharded.
    If such a set has no process group, there is one all-reduce per axis instead. One more
    all-reduce runs over ``pp``.

    Args:
        parameters: Parameters with the gradients to scale. Duplicates are ignored.
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
        ValueError: ``max_norm`` or ``norm_type`` is invalid.
        LayoutError: ``collectives`` does not implement `Collectives`. Or a gradient has partial
            values. Or a `RaggedTensor` has rows marked by `mark_repeated_rows`. In the last two
            cases, only ranks with this gradient raise, and the other ranks wait in the all-reduce.
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
    collectives = checked_collectives(collectives)
    stages = None if pp is None else _stages(pp)
    limit = _limit(max_norm)
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # `map` with a function written in C is faster than one Python call for each parameter.
    unique = list(dict(zip(map(id, given), given, strict=True)).values())
    covering, by_ranks, repeated = _by_ranks(unique)
    gradients = [grad for grads in by_ranks.values() for grad in grads]
    scaled = gradients + _merged(repeated)
    dtype = _dtype([*unique, *gradients])
    device = next((x.device for x in (*gradients, *unique)), torch.device("cpu"))
    # Ranks may have gradients of different dtypes, or none, but must all-reduce the same dtype.
    total = torch.zeros((), dtype=torch.float64, device=device)
    # Every rank all-reduces over the sets of ranks in the same order. With different orders, two
    # ranks that are both in two sets would wait for each other.
    for ranks in sorted(by_ranks, key=sorted):
        part = _power_sum(by_ranks[ranks], order, dtype, total, foreach is not False)
        for axis in covering[ranks]:
            part = _all_reduce(axis, part, order, collectives)
        total = torch.maximum(total, part) if order == math.inf else total + part
    if stages is not None:
        total = _all_reduce(stages, total, order, collectives)
    norm = (total if order == math.inf else total.pow(1.0 / order)).to(dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {order} is {norm.item()}; pass "
            "error_if_nonfinite=False to scale anyway"
        )
    if isinstance(limit, Tensor):
        limit = limit.to(norm.device)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for device in {grad.device for grad in scaled}:
        on_device = [grad for grad in scaled if grad.device == device]
        if foreach is not False:
            foreach_scale(on_device, factor.to(device))
            continue
        for grad in on_device:
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
    if found or vars(parameter).get(_REPEATED_ROWS):
        vars(parameter)[_REPEATED_ROWS] = found


_REPEATED_ROWS = "repeated_rows"
_MERGED_NUMEL = 2**16  # largest number of elements that `_merged` puts into one view


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


_Ranks: TypeAlias = frozenset[int]


def _by_ranks(
    parameters: Sequence[Tensor],
) -> tuple[dict[_Ranks, tuple[Axis, ...]], dict[_Ranks, list[Tensor]], list[Tensor]]:
    """Group gradients by the set of global ranks over which they are sharded.

    The set is empty for gradients that are not sharded. If a parameter has no gradient, the result
    still has the set of the parameter. So all ranks find the same sets.

    Returns:
        A tuple ``(axes, gradients, repeated)``:

        - ``axes``: Dict from each set of ranks to the `Axis` objects over which to all-reduce, one
          after the other.
        - ``gradients``: Dict from each set of ranks to the local tensors of the gradients.
        - ``repeated``: Views of all rows that `mark_repeated_rows` marked.
    """
    covering: dict[_Ranks, tuple[Axis, ...]] = {}
    gradients: dict[_Ranks, list[Tensor]] = {}
    repeated: list[Tensor] = []
    known: dict[tuple[object, ...], list[Tensor]] = {}
    last, current = None, []
    for parameter, grad, attributes in zip(
        parameters, map(attrgetter("grad"), parameters), map(vars, parameters), strict=True
    ):
        sharded = parameter if grad is None else grad
        kind = _kind(sharded)
        if kind != last:
            last = kind
            if kind not in known:
                ranks, axes = _sharded_over(sharded)
                known[kind] = gradients.setdefault(ranks, [])
                covering[ranks] = min(covering.get(ranks, axes), axes, key=_preference)
            current = known[kind]
        if grad is None:
            continue
        if not (rows := attributes.get(_REPEATED_ROWS, ())):
            current.append(local_tensor_of(grad))
            continue
        unique, others = _split_rows(grad, frozenset(rows))
        current.extend(unique)
        repeated.extend(others)
    return covering, {ranks: _merged(grads) for ranks, grads in gradients.items()}, repeated


def _kind(x: Tensor) -> tuple[object, ...]:
    """Return a key of the mesh and the placement types of a tensor.

    Tensors with equal keys are sharded over the same ranks. The key of a plain tensor is empty.
    """
    if not isinstance(x, (DTensor, RaggedTensor)):  # faster than with a union
        return ()
    spec = spec_of(x)  # the properties of the tensor are slower
    return id(spec.mesh), *map(type, spec.placements)


def _sharded_over(x: Tensor) -> tuple[frozenset[int], tuple[Axis, ...]]:
    """Return the global ranks over which a tensor is sharded, and `Axis` objects that span them.

    Both are empty if the tensor is not sharded, or if this rank is not in the mesh of the tensor.
    Raises `LayoutError` if the tensor has partial values.
    """
    if (distributed := mesh_and_placements(x)) is None:
        return frozenset(), ()
    mesh, placements = distributed
    axes = tuple(
        axis
        for axis, placement in enumerate(placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )
    if any(isinstance(placements[axis], Partial) for axis in axes):
        raise LayoutError(
            f"a gradient with placements {placements} is not reduced yet; redistribute it to "
            "Replicate() or Shard(dim) before clipping, or use redistribute(p, p.placements) in "
            "place of the parameter p in forward, whose gradient then comes in the layout of p"
        )
    if not axes or mesh.get_coordinate() is None:
        return frozenset(), ()
    return frozenset(ranks_along(mesh, axes)), axes_over(mesh, axes)


def _preference(axes: tuple[Axis, ...]) -> tuple[object, ...]:
    """Return a sort key for several tuples of axes that all span the same ranks.

    Two meshes may have different process groups of the same ranks. With this key, all ranks choose
    the same groups, even if they have their parameters in different orders.
    """
    return len(axes), [(axis.name, group_name(axis.group)) for axis in axes]


def _merged(gradients: list[Tensor]) -> list[Tensor]:
    """Replace small gradients that are adjacent in one storage by one flat view.

    Other gradients are returned unchanged. Gradients without elements are left out.
    """
    # hp-fsdp places small gradients next to each other. One call for all of them is faster, because
    # the call itself takes longer than reading a small gradient.
    # For each view to return: its first gradient, and its number of elements.
    runs: list[tuple[Tensor, int]] = []
    # The number of elements by which the last view can still grow, and the address of its end.
    room = end = 0
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
        if numel < _MERGED_NUMEL and dense and type(grad) is Tensor:
            held = grad.untyped_storage().nbytes() // size - int(grad.storage_offset())
            room, end = min(held, _MERGED_NUMEL) - numel, start + numel * size
    return [
        first if numel == first.numel() else first.as_strided((numel,), (1,))
        for first, numel in runs
    ]


def _stages(pp: AxisMesh | Axis) -> Axis:
    if isinstance(pp, Axis):
        return pp
    if getattr(pp, "ndim", None) != 1:
        raise MeshError(
            f"pp={pp!r} is no axis; use an Axis or a mesh of one axis, such as mesh['pp']"
        )
    return Axis.of(pp)


def _split_rows(grad: Tensor, marked: Collection[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of views of a gradient: the unmarked rows and the marked rows of this rank.

    ``marked`` has the indices of the marked rows along dim 0 of the global tensor. Raises
    `LayoutError` for a `RaggedTensor`.
    """
    if isinstance(grad, RaggedTensor):
        raise LayoutError(
            f"a ragged gradient of shape {tuple(grad.shape)} with repeated rows; shard it with "
            "Shard(dim), or remove the mark with mark_repeated_rows(parameter, [])"
        )
    unique: list[Tensor] = []
    repeated: list[Tensor] = []
    for box, view in local_boxes(grad).boxes:
        start, stop = box[0]
        at = 0
        for is_repeated, run in groupby(range(start, stop), marked.__contains__):
            count = len(list(run))
            (repeated if is_repeated else unique).append(view[at : at + count])
            at += count
    return unique, repeated


def _power_sum(
    gradients: list[Tensor], order: float, dtype: torch.dtype, like: Tensor, foreach: bool
) -> Tensor:
    """Return the sum of ``|x| ** order`` over all elements ``x`` of the gradients.

    If ``order`` is inf, return the maximum of ``|x|``. The norm of each gradient is computed in
    ``dtype``. The result is a scalar tensor with the dtype and the device of ``like``. It is 0 if
    there are no elements.
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


def _all_reduce(axis: Axis, part: Tensor, order: float, collectives: Collectives) -> Tensor:
    """All-reduce a scalar tensor over an axis: maximum if ``order`` is inf, otherwise sum."""
    if order == math.inf:
        return largest_over(part, [axis], collectives)
    (result,) = collectives.all_reduce(axis, [part], op="sum").wait()
    return result


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype of the norm: float32, or a wider dtype if a tensor needs one.

    The result is the type promotion of float32 and the dtypes of ``tensors``. A complex dtype
    counts as its real dtype, and floats of one byte are ignored. ``tensors`` includes all
    parameters, so that a rank without gradients gets the same dtype.
    """
    real = {dtype.to_real() for dtype in {tensor.dtype for tensor in tensors}}
    # torch cannot promote floats of one byte, which parameters of frozen layers can have.
    promoted = [dtype for dtype in real if not (dtype.is_floating_point and dtype.itemsize == 1)]
    return reduce(torch.promote_types, promoted, torch.float32)
