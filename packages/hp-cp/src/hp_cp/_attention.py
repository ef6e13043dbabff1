"""Attention of local rows: check the tensors, make the plan, choose a kernel, run, exchange back.

Everything up to the plan looks at what this rank was given and communicates nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import AxisMesh, Collectives, TorchCollectives

from ._errors import InputError, LayoutError, described
from ._layouts import Contiguous, Layout, check_layout, told_length
from ._lineage import check_lineage
from ._masks import MaskSpec, check_mask
from ._mesh import Seats, check_equal_lengths, seats_of
from ._plan import AttentionPlan, plan_attention
from ._routes import Schedule, check_schedule, ring_of
from ._schedules import attend, run_of
from ._torch import keep_eager
from ._ulysses import exchange_of, heads_to_rows, rows_to_heads, swap_halves
from .kernels._choose import choose_backend
from .kernels._interface import AttentionBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What is asked of one attention: the arguments of `context_parallel_attention`.

    ``load_balance`` is that of `ContextParallel`.
    """

    mask: MaskSpec
    layout: Layout | None
    ulysses_degree: int
    schedule: Schedule
    backend: str | AttentionBackend
    scale: float | None
    seq_dim: int
    head_dim: int
    seq_len: int | None
    collectives: Collectives
    keep_kv: bool | None = None
    load_balance: bool = False

    @property
    def whole_length(self) -> int | None:
        """Return the length of the whole sequence: the one given, or where the documents end."""
        return told_length(self.layout, self.mask) if self.seq_len is None else self.seq_len


@keep_eager  # a plan is no tensor program
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    *,
    mask: MaskSpec,
    layout: Layout | None = None,
    ulysses_degree: int = 1,
    schedule: Schedule = "direct",
    backend: str | AttentionBackend = "auto",
    scale: float | None = None,
    seq_dim: int = 2,
    head_dim: int = 1,
    seq_len: int | None = None,
    keep_kv: bool | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return this rank's rows of the attention over the whole sequence, shaped like ``q``.

    q, k and v are this rank's rows, 4-D with the head size last: ``[batch, heads, rows, size]``
    where ``seq_dim=2, head_dim=1``. q may have a multiple of the heads of k and v (grouped
    queries). ``layout`` says which positions the rows are; None means `Contiguous`, and one that
    follows the mask follows this one (`Pinned` keeps that of another). ``seq_len`` is the length of
    the whole sequence. None means where the mask's documents end, else the local length times the
    number of ranks, for which ranks compare their lengths: one all-reduce per axis of two ints for
    each length that is new to the group. Under autocast the inputs are cast as SDPA casts them.

    Keys and values come by the ``schedule``, and by the same way again in the backward unless
    ``keep_kv`` keeps them (None: gather alone does), whose gradients go home: ``gather`` has one
    all-gather (sends from rank to rank where lengths differ) and one exchange per other rank for
    gradients; ``direct`` one exchange per other rank, of the rows that the mask shows; ``ring`` and
    ``double_ring`` (a `DoubleRing` names its size) pass all of them on. ``ulysses_degree = u``
    exchanges heads for rows among ``u`` neighbouring ranks, one all-to-all of q, k, v, one of the
    output, and both again in the backward; the schedule then runs over the ``n / u`` groups. On a
    ``mesh`` of two axes the last one is that of Ulysses, and ``u`` its size. `plan_attention` tells
    blocks and bytes. The first call on a group, on other devices than a CPU, exchanges one element
    between all of its ranks before the rest. The same inputs give the same bits every time where
    the kernels do so (on CUDA some need ``torch.use_deterministic_algorithms``), and Ulysses on all
    ranks those of one process (but for the gradients of kv heads that several ranks read, and for
    windows where several threads of a CPU process split the merge of many rows).

    Raises `DegreeError`, `LayoutError`, `InputError` or `BackendError`, before any communication:
    on every rank together where all give tensors of equal shape and dtype and the same options. A
    local length that the layout does not give is seen on that rank only, while the others wait.
    Without ``seq_len`` and documents, lengths that differ raise `InputError` on every rank after
    the comparison, where none of them was compared on this group before. Where one was, ranks that
    hold it do not compare again, and nothing is raised: give ``seq_len`` where lengths can differ,
    or find such a call with ``collectives=CheckedCollectives()`` of hp-dtensor, which raises
    ``RankMismatchError`` on every rank, at its deadline where one waits in an exchange from rank to
    rank.
    """
    options = AttentionOptions(
        mask=mask,
        layout=layout,
        ulysses_degree=ulysses_degree,
        schedule=schedule,
        backend=backend,
        scale=scale,
        seq_dim=seq_dim,
        head_dim=head_dim,
        seq_len=seq_len,
        keep_kv=keep_kv,
        collectives=TorchCollectives() if collectives is None else collectives,
    )
    return sharded_attention(q, k, v, mesh, options)


def sharded_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: AxisMesh, options: AttentionOptions
) -> Tensor:
    """Return this rank's rows of the attention, shaped like ``q``: check, plan, choose, run."""
    dims = options.seq_dim, options.head_dim
    check_dims(*dims)
    check_tensors(q, k, v)
    check_scale(options.scale)
    seats = seats_of(mesh, options.ulysses_degree, options.collectives)
    q, k, v = (as_autocast(x) for x in (q, k, v))
    plan = plan_inputs(q, k, v, seats, options)
    kernel = choose_backend(
        options.backend, plan.kernels, q.device, q.dtype, plan.head_size, regular=plan.regular
    )
    check_rows(q, plan, seats, options)
    seats.across.connect(q.device)
    q, k, v = (to_batch_first(x, *dims) for x in (q, k, v))
    out = planned_attention(q, k, v, plan, seats, kernel, options.scale)
    return from_batch_first(out, *dims)


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    seats: Seats,
    backend: AttentionBackend,
    scale: float | None,
) -> Tensor:
    """Return this rank's rows ``[batch, heads, rows, size]`` of the attention that is planned."""
    run = run_of(plan, seats.inside.index, seats.across, backend, scale)
    if plan.load_balance:
        return swap_halves(attend(swap_halves(q, run.peers), k, v, run), run.peers, back=True)
    if plan.ulysses_degree == 1:
        return attend(q, k, v, run)
    exchange = exchange_of(plan, seats)
    q, k, v = rows_to_heads(q, k, v, exchange)
    return heads_to_rows(attend(q, k, v, run), exchange)


def check_dims(seq_dim: int, head_dim: int) -> None:
    """Raise `InputError` unless both are dims of a 4-D tensor before the head size."""
    if seq_dim == head_dim or not all(type(d) is int and 0 <= d < 3 for d in (seq_dim, head_dim)):
        raise InputError(
            f"seq_dim={seq_dim!r} and head_dim={head_dim!r} are no dims of rows and heads in "
            f"tensors whose last of four dims is the head size; use two different dims of 0, 1, 2"
        )


def check_tensors(q: object, k: object, v: object) -> None:
    """Raise `InputError` unless all three are tensors of four dims."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, got {described(x)}")
        if x.ndim != 4:
            raise InputError(
                f"attention takes 4-D tensors whose last dim is the head size, got {name} of "
                f"shape {tuple(x.shape)}"
            )


def check_scale(scale: Any) -> None:
    """Raise `InputError` unless scores are scaled by a number, or by default."""
    if scale is not None and (type(scale) not in (int, float) or not math.isfinite(scale)):
        raise InputError(
            f"scale={described(scale)} is no finite number, and no gradient goes to it; pass a "
            f"float, or None for head_size ** -0.5"
        )


def plan_inputs(
    q: Tensor, k: Tensor, v: Tensor, seats: Seats, options: AttentionOptions
) -> AttentionPlan:
    """Return the plan for these local tensors, or raise for what does not fit.

    Ranks whose tensors have equal shapes raise together; `check_rows` sees what is this rank's
    alone. Communicates only where the local length, from which that of the whole is inferred, makes
    no plan: others may hold another one.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, DTensor):
            raise InputError(
                f"{name} is a DTensor with {x.placements}; pass local rows, {name}.to_local(), or "
                f"use ContextParallel, which takes DTensors"
            )
    if k.shape != v.shape or _without(q, options.head_dim) != _without(k, options.head_dim):
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in all dims "
            f"but the heads of q, dim {options.head_dim}; cross attention and unequal head sizes "
            f"are not supported"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise InputError(
            f"q, k and v must share dtype and device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}"
        )
    whole = options.whole_length
    try:
        plan = plan_attention(
            options.mask,
            options.layout,
            seats.n,
            q.shape[options.seq_dim] * seats.n if whole is None else whole,
            schedule=options.schedule,
            ulysses_degree=options.ulysses_degree,
            keep_kv=options.keep_kv,
            load_balance=options.load_balance,
            batch=q.shape[3 - options.seq_dim - options.head_dim],
            q_heads=q.shape[options.head_dim],
            kv_heads=k.shape[options.head_dim],
            head_size=q.shape[3],
            itemsize=q.element_size(),
        )
    except LayoutError:
        _check_shared(options, seats.n)
        compare_rows(q, seats, options)  # others may have no error
        raise
    check_lineage((q, k, v), plan)
    return plan


def _check_shared(options: AttentionOptions, n: int) -> None:
    """Raise `LayoutError` for options that make no plan of any length."""
    check_schedule(options.schedule)
    check_mask(options.mask)
    check_layout(Contiguous() if options.layout is None else options.layout)
    ring_of(options.schedule, n // options.ulysses_degree)


def compare_rows(q: Tensor, seats: Seats, options: AttentionOptions) -> None:
    """Raise `InputError` where the whole length is inferred from local ones that are not equal."""
    if options.whole_length is None:
        length = q.shape[options.seq_dim]
        check_equal_lengths(seats.axes, (length,), q.device, options.collectives)


def check_rows(q: Tensor, plan: AttentionPlan, seats: Seats, options: AttentionOptions) -> None:
    """Raise for another number of rows than the plan gives this rank.

    `InputError`, or `LayoutError` where the documents cannot be those of such rows on any rank.
    Communicates as `compare_rows`.
    """
    compare_rows(q, seats, options)
    rows = q.shape[options.seq_dim]
    if rows == plan.lengths[seats.rank]:
        return
    if options.seq_len is None and rows not in plan.lengths:
        plan.mask.documents(rows * plan.n)
    raise InputError(
        f"q has {rows} local tokens but {type(plan.layout).__name__}(n={plan.n}, "
        f"S={plan.seq_len}) gives rank {seats.rank} {plan.lengths[seats.rank]}; shard with "
        f"shard_sequence first, and give seq_len where ranks hold unequal lengths"
    )


def to_batch_first(x: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """Return a view ``[batch, heads, rows, size]`` with a dense last dim."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.permute(3 - seq_dim - head_dim, head_dim, seq_dim, 3)


def from_batch_first(x: Tensor, seq_dim: int, head_dim: int) -> Tensor:
    """Undo `to_batch_first`."""
    order = [3 - seq_dim - head_dim, head_dim, seq_dim, 3]
    return x.permute([order.index(dim) for dim in range(4)])


def as_autocast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast hands it to SDPA: any floating dtype but float64 becomes its own."""
    device = x.device.type
    known = torch.amp.is_autocast_available(device)
    if not known or not torch.is_autocast_enabled(device) or not x.is_floating_point():
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device))


def _without(x: Tensor, dim: int) -> list[int]:
    return [size for i, size in enumerate(x.shape) if i != dim]
