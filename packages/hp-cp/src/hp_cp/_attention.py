"""Attention of local rows: check the tensors, make the plan, choose a kernel, run, exchange back.

Everything up to the plan looks at what this rank was given and communicates nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import AxisMesh, Collectives, TorchCollectives
from hp_dtensor.torch_compat import autocast_dtype, keep_eager

from ._blockwise import as_slice, fuses_merges
from ._errors import InputError, described
from ._layouts import Chunks, Layout, told_length
from ._lineage import check_lineage
from ._masks import MaskSpec
from ._mesh import RankGroups, check_equal_lengths, rank_groups_of
from ._plan import AttentionPlan, executed_part_of, plan_attention, rank_plan_of
from ._routes import Schedule
from ._schedules import RankSchedule, attend, rank_schedule_of
from ._torch import has_values
from ._ulysses import Exchange, heads_of, heads_to_rows, rows_to_heads, swap_halves
from .kernels._choose import choose_backends
from .kernels._interface import PLAIN, AttentionBackend, Dropout, ScoreOptions
from .kernels._sdpa import hardware_of

TORCH = TorchCollectives()  # which keep no state


class AttentionOptions(NamedTuple):
    """What is asked of one attention: the arguments of `context_parallel_attention`.

    ``load_balance`` is that of `ContextParallel`.
    """

    mask: MaskSpec
    layout: Layout | None
    ulysses_degree: int
    schedule: Schedule
    backend: str | AttentionBackend
    scores: ScoreOptions
    seq_dim: int
    head_dim: int
    seq_len: int | None
    keep_kv: bool | None = None
    load_balance: bool = False
    return_lse: bool = False
    fuse_merges: bool | None = None
    collectives: Collectives = TORCH

    @property
    def whole_length(self) -> int | None:
        """Return the length of the whole sequence: the one given, or where the documents end."""
        return told_length(self.layout, self.mask) if self.seq_len is None else self.seq_len


class _Options(TypedDict, total=False):
    """What `context_parallel_attention` takes beside what its overloads name."""

    layout: Layout | None
    ulysses_degree: int
    schedule: Schedule
    backend: str | AttentionBackend
    scale: float | None
    softcap: float | None
    dropout_p: float
    dropout_seed: int | None
    sinks: Tensor | None
    seq_dim: int
    head_dim: int
    seq_len: int | None
    keep_kv: bool | None
    fuse_merges: bool | None
    collectives: Collectives | None


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    *,
    mask: MaskSpec,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    *,
    mask: MaskSpec,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


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
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    seq_dim: int = 2,
    head_dim: int = 1,
    seq_len: int | None = None,
    keep_kv: bool | None = None,
    fuse_merges: bool | None = None,
    collectives: Collectives | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over a sequence whose positions are distributed over the ranks of a mesh.

    Each rank passes queries, keys and values of its own positions only, and gets the outputs of
    these positions. One position of a tensor is called a row. Gradients return to the rank that
    passed the row. All ranks of ``mesh`` must call the function with the same options. If one of
    them runs the backward, all of them must run it.

    The schedule decides how a rank receives the keys and values of other ranks:

    - ``"direct"``: each rank receives from each other rank only the rows that its queries can see.
      The backward receives these rows again and returns their gradients.
    - ``"gather"``: one all-gather of all rows. Sends between ranks replace it if local lengths
      differ or if Ulysses uses the same mesh axis. The backward returns the gradients by one
      all-to-all.
    - ``"ring"``: each rank passes all rows on to the next rank, until every rank has seen them. The
      backward does so again, together with the gradients.
    - ``"double_ring"`` or a `DoubleRing`: like ``"ring"``, on two levels: rings of neighbouring
      ranks, and a ring of these rings.

    With ``ulysses_degree=u``, groups of ``u`` neighbouring ranks exchange rows for heads: each rank
    gets all rows of its group for a part of the heads. This takes one all-to-all for q, k and v,
    and one for the output; the backward repeats both. The schedule then runs over the ``n / u``
    groups. `plan_attention` lists the computed blocks and the received bytes. Under autocast,
    inputs are cast as in ``scaled_dot_product_attention``.

    Args:
        q: This rank's queries, ``[batch, q_heads, rows, head_size]`` with the default dims.
            ``q_heads`` is a multiple of ``kv_heads``.
        k: This rank's keys, ``[batch, kv_heads, rows, head_size]``.
        v: This rank's values, ``[batch, kv_heads, rows, value_size]``.
        mesh: Mesh of the ranks that share the sequence: one axis, or two axes ``(outer, ulysses)``.
        mask: Attention mask of the whole sequence.
        layout: Positions of each rank. Layouts that depend on the mask, such as `Greedy`, use
            ``mask``; `Pinned` uses another mask. Defaults to None: `Contiguous`.
        ulysses_degree: Number of neighbouring ranks that exchange rows for heads, see above. On a
            mesh of two axes, it must be the size of the last axis. Defaults to 1: no exchange.
        schedule: How keys and values reach other ranks, see above. Defaults to ``"direct"``.
        backend: Kernel: ``"auto"``, ``"sdpa"``, ``"efficient"``, ``"flex"``, ``"cudnn"``,
            ``"varlen"``, ``"eager"``, a name from `register_backend`, or an `AttentionBackend`.
            Defaults to ``"auto"``: the first kernel that supports the inputs.
        scale: Factor by which the products of queries and keys are multiplied. Defaults to None:
            ``head_size ** -0.5``.
        softcap: Bound of the scores: ``softcap * tanh(scores / softcap)``. Defaults to None: no
            bound.
        dropout_p: Probability that an attention weight becomes zero. The same weights become zero
            on any number of ranks. Defaults to 0.0.
        dropout_seed: Seed of the dropout, an int from 0 to ``2**63 - 1``, equal on all ranks of
            ``mesh``. Use another seed for every layer, step and batch. Required if ``dropout_p`` is
            not 0.
        sinks: One score per query head, ``[q_heads]``, equal on all ranks. The scores are added to
            the denominator of the softmax only, without ``scale`` and ``softcap``. Each rank gets
            the gradient from its own rows: sum the gradients over the ranks. Defaults to None.
        return_lse: If True, also return the log-sum-exp. Defaults to False.
        seq_dim: Dim of the rows in ``q``, ``k`` and ``v``. Defaults to 2.
        head_dim: Dim of the heads in ``q``, ``k`` and ``v``. Defaults to 1.
        seq_len: Length of the whole sequence, in positions. Defaults to None: the end of the last
            document if the mask has documents, else the local length times the number of ranks. In
            the latter case, ranks compare their local lengths: one all-reduce of two ints per axis,
            once for each new length of a process group.
        keep_kv: If True, received keys and values are kept for the backward. If False, the backward
            fetches them again. Defaults to None: True for ``"gather"``, else False.
        fuse_merges: If True, one kernel of ``torch.compile`` merges two partial results; if False,
            six operations do. Results are equal up to rounding. Ranks may pass different values.
            Defaults to None: True on CUDA with Triton; if the compilation fails, it warns and uses
            the six operations.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Returns:
        This rank's rows of the output, shaped like ``q`` with the head size of ``v``. With
        ``return_lse=True``, a tuple of the output and the log-sum-exp of each query's scores,
        including ``sinks``. The log-sum-exp has the dims of the output without the last one, is
        float32 (float64 for float64 inputs), and has no gradient.

    Raises:
        InputError: Tensors, options, the mask, the layout or the degrees are invalid, or the inputs
            come from a layer that used another layout. All ranks raise together before
            communication if their tensors have equal shapes and dtypes and their options are equal.
            Exceptions:

            - If a tensor does not have the number of rows that the layout assigns to this rank,
              only this rank raises, and the others wait.
            - If local lengths differ and neither ``seq_len`` nor documents are given, all ranks
              raise after the comparison of lengths. A rank does not compare a length that it has
              compared on this process group before. In that case nothing is raised, and
              collectives can hang. Pass ``seq_len``, or find such calls with
              ``CheckedCollectives`` of hp-dtensor.
        BackendError: The backend does not exist or does not support the inputs. All ranks raise
            together before communication. With ``fuse_merges=True``, a failed compilation raises on
            its rank only, and the others wait.

    Examples:
        On 4 ranks:

        >>> mesh, layout = init_device_mesh("cpu", (4,)), Zigzag()
        >>> q, k, v = torch.randn(3, 1, 8, 64, 16)  # equal on all ranks
        >>> q, k, v = shard_sequence((q, k, v), mesh, layout, seq_dim=2)
        >>> out = context_parallel_attention(
        ...     q, k, v, mesh, mask=MaskSpec(causal=True), layout=layout, seq_len=64
        ... )
        >>> out.shape  # this rank's 16 of 64 rows
        torch.Size([1, 8, 16, 16])

    Note:
        - Results are bitwise reproducible if the kernels are; on CUDA, some kernels need
          ``torch.use_deterministic_algorithms(True)``.
        - Ulysses over all ranks gives the bits of one process with the same fused kernel.
          Exceptions are the gradients of KV heads that several ranks read, and windows on a CPU
          with several threads.
        - If ``"gather"`` keeps keys, a backward that frees its graph overwrites them with
          gradients. ``saved_tensors_hooks`` that keep saved tensors must copy them; otherwise use
          ``keep_kv=False``.
        - On devices other than a CPU, the first call on a process group exchanges one element
          between all of its ranks.
        - If the rows of the batch have different documents, they are concatenated to one sequence.
          This needs no copy for ``[batch, rows, heads, size]``, else one copy of ``q``, ``k`` and
          ``v``.
        - `plan_attention` does not count the all-to-all of the log-sum-exp with Ulysses.
    """
    options = AttentionOptions(
        mask=mask,
        layout=layout,
        ulysses_degree=ulysses_degree,
        schedule=schedule,
        backend=backend,
        scores=_scores_of(scale, softcap, dropout_p, dropout_seed),
        return_lse=return_lse,
        seq_dim=seq_dim,
        head_dim=head_dim,
        seq_len=seq_len,
        keep_kv=keep_kv,
        fuse_merges=fuse_merges,
        collectives=TORCH if collectives is None else collectives,
    )
    out, lse = sharded_attention(q, k, v, mesh, options, sinks)
    return out if lse is None else (out, lse)


def dropout_of(rate: Any, seed: Any) -> Dropout | None:
    """Return which weights become zero; None for a rate of zero, which needs no seed."""
    return None if type(rate) in (int, float) and rate == 0 else Dropout(rate=rate, seed=seed)


def _scores_of(scale: Any, softcap: Any, rate: Any, seed: Any) -> ScoreOptions:
    dropout = dropout_of(rate, seed)
    if scale is None and softcap is None and dropout is None:
        return PLAIN
    return ScoreOptions(scale=scale, softcap=softcap, dropout=dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAttention:
    """All that is the same in every call with tensors and options like these, on one rank.

    It keeps no tensors, groups or meshes. ``order`` are the dims of a tensor as ``[batch, rows,
    heads, size]``, and ``back`` those of such a one as the caller has them. ``heads`` are the query
    and the kv heads of each rank of Ulysses, ``sinks`` the query heads of this one. ``asks``: ranks
    compare their lengths, from which that of the whole is inferred.
    """

    plan: AttentionPlan
    schedule: RankSchedule
    order: list[int]
    back: list[int]
    chunks: Chunks
    heads: tuple[tuple[range, ...], tuple[range, ...]]
    sinks: slice
    asks: bool


# Of calls with these options, tensors and places of a rank; the latest ones.
_BOUND: dict[tuple[object, ...], BoundAttention] = {}
_BOUND_KEPT = 64
_BINDING = Lock()


def bound_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    groups: RankGroups,
    options: AttentionOptions,
) -> BoundAttention:
    """Return what a known call needs, or check and plan a new one.

    Masks by functions, which nothing here is to keep alive, and dropout, whose seed is another one
    in every call, are bound in every call.
    """
    asked = options[:-1]  # all but the collectives
    tensors = [
        (type(x), x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)
        for x in (q, k, v, sinks)
    ]
    place = groups.n, groups.rank, groups.ring.size, groups.ring.whole, groups.ulysses.size
    # What the choice of a kernel looks at beside them.
    hardware = hardware_of(q.device) if q.is_cuda else None
    state = hardware, torch.are_deterministic_algorithms_enabled()
    key = *asked, *map(type, asked), *tensors, *place, *state
    try:
        known = _BOUND.get(key)
    except TypeError:  # something without a hash, which the checks name
        known = None
    if known is None:
        known = _bind(q, k, v, sinks, groups, options)
        if options.mask.mask_mod is None and options.scores.dropout is None:
            with _BINDING:
                _BOUND[key] = known
                if len(_BOUND) > _BOUND_KEPT:
                    del _BOUND[next(iter(_BOUND))]
    return known


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    groups: RankGroups,
    options: AttentionOptions,
) -> BoundAttention:
    """Check tensors and options, make the plan, choose a kernel, and say what this rank does."""
    if type(options.return_lse) is not bool:
        raise InputError(f"return_lse is {described(options.return_lse)}; use True or False")
    if type(options.fuse_merges) not in (bool, type(None)):
        raise InputError(f"fuse_merges is {described(options.fuse_merges)}; use a bool or None")
    check_dims(options.seq_dim, options.head_dim)
    check_sinks(sinks, q, options)
    plan = plan_inputs(q, k, v, groups, options)
    check_lineage((q, k, v), plan, q.shape[options.seq_dim])  # every call: before any comparison
    backends = choose_backends(options.backend, plan, q.device, q.dtype, options.scores)
    # Before any communication: it may compile, which takes seconds, and raise on one rank.
    merges = groups.ring.size > 1 or plan.mask != MaskSpec(causal=plan.mask.causal)
    fused = merges and has_values(q) and fuses_merges(q.device, q.dtype, options.fuse_merges)
    compare_rows(q, groups, options)  # before a function is asked: it may raise on one rank
    executed = plan.executed
    if plan.mask.mask_mod is not None:
        executed_part_of(executed, groups.ring.index, backends.windows, str(q.device))
    check_rows(q, plan, groups, options)
    mine = rank_plan_of(executed, groups.rank)
    order = [3 - options.seq_dim - options.head_dim, options.seq_dim, options.head_dim, 3]
    return BoundAttention(
        plan=plan,
        schedule=rank_schedule_of(
            executed, groups, backends, options.scores, q.device, fuse_merges=fused
        ),
        order=order,
        back=[order.index(dim) for dim in range(4)],
        chunks=mine.chunks,
        heads=heads_of(mine.shares),
        sinks=as_slice(mine.share.q),
        asks=options.whole_length is None,
    )


def sharded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    options: AttentionOptions,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's rows of the attention, shaped like ``q``: check, plan, choose, run.

    And their log-sum-exp, if ``options`` ask for it.
    """
    check_tensors(q, k, v)
    groups = rank_groups_of(mesh, options.ulysses_degree, options.collectives)
    if (dtype := autocast_dtype(q.device)) is not None:
        q, k, v = (as_autocast(x, dtype) for x in (q, k, v))
    bound = bound_attention(q, k, v, sinks, groups, options)
    plan, schedule = bound.plan, bound.schedule
    check_lineage((q, k, v), plan, q.shape[options.seq_dim])
    if bound.asks:
        compare_rows(q, groups, options)
    groups.ring.connect(q.device)
    q, k, v = _permuted(q, bound.order), _permuted(k, bound.order), _permuted(v, bound.order)
    batch, rows = q.shape[:2]
    if plan.mask.per_row:  # the batch is one sequence, in memory too where rows come before heads
        q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
    home: Callable[[Tensor], Tensor] | None = None
    if plan.load_balance:
        q = swap_halves(q, groups.ring)
        home = partial(swap_halves, peers=groups.ring, back=True)
    elif plan.ulysses_degree > 1:
        q_heads, kv_heads = bound.heads
        exchange = Exchange(peers=groups.ulysses, chunks=bound.chunks, q=q_heads, kv=kv_heads)
        q, k, v = rows_to_heads(q, k, v, exchange)
        home = partial(heads_to_rows, exchange=exchange)
        sinks = None if sinks is None else sinks[bound.sinks]
    out, lse = attend(q, k, v, sinks, schedule, groups.ring, return_lse=options.return_lse)
    if home is not None:
        out, lse = home(out), None if lse is None else home(lse.unsqueeze(3)).squeeze(3)
    if plan.mask.per_row:
        out = out.unflatten(1, (batch, rows)).squeeze(0)
        lse = None if lse is None else lse.unflatten(1, (batch, rows)).squeeze(0)
    if lse is not None:
        lse = lse.unsqueeze(3).permute(bound.back).squeeze(3)
    return out.permute(bound.back), lse


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    """Return a view with the dims in this order, and a dense last one."""
    return (x if x.stride(-1) == 1 else x.contiguous()).permute(order)


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


def check_sinks(sinks: object, q: Tensor, options: AttentionOptions) -> None:
    """Raise `InputError` unless there is one floating score per head of ``q``, or None."""
    if sinks is None:
        return
    heads = q.shape[options.head_dim]
    if not isinstance(sinks, Tensor) or isinstance(sinks, DTensor):
        raise InputError(
            f"sinks must be a plain tensor of one score per query head, got {described(sinks)}; "
            f"pass a tensor of shape ({heads},), of a DTensor what to_local() or full_tensor() "
            f"returns"
        )
    if sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device != q.device:
        raise InputError(
            f"sinks {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device} are not one floating "
            f"score for each of the {heads} query heads on {q.device}; pass a tensor of shape "
            f"({heads},) there"
        )


def plan_inputs(
    q: Tensor, k: Tensor, v: Tensor, groups: RankGroups, options: AttentionOptions
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
    if k.shape[:3] != v.shape[:3] or _without(q, options.head_dim) != _without(k, options.head_dim):
        raise InputError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in all dims "
            f"but the heads of q, dim {options.head_dim}, and the head size of v, dim 3; cross "
            f"attention and unequal head sizes of q and k are not supported"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise InputError(
            f"q, k and v must share dtype and device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}"
        )

    def planned(seq_len: int) -> AttentionPlan:
        return plan_attention(
            options.mask,
            options.layout,
            groups.n,
            seq_len,
            schedule=options.schedule,
            ulysses_degree=options.ulysses_degree,
            keep_kv=options.keep_kv,
            load_balance=options.load_balance,
            batch=q.shape[3 - options.seq_dim - options.head_dim],
            q_heads=q.shape[options.head_dim],
            kv_heads=k.shape[options.head_dim],
            head_size=q.shape[3],
            value_size=v.shape[3],
            itemsize=q.element_size(),
        )

    whole = options.whole_length
    try:
        return planned(q.shape[options.seq_dim] * groups.n if whole is None else whole)
    except InputError:
        if whole is None:
            planned(0)  # fails on every rank where no length would serve
            compare_rows(q, groups, options)  # others may have no error
        raise


def compare_rows(q: Tensor, groups: RankGroups, options: AttentionOptions) -> None:
    """Raise `InputError` where the whole length is inferred from local ones that are not equal."""
    if options.whole_length is None:
        length = q.shape[options.seq_dim]
        check_equal_lengths(groups.axes, (length,), q.device, options.collectives)


def check_rows(
    q: Tensor, plan: AttentionPlan, groups: RankGroups, options: AttentionOptions
) -> None:
    """Raise `InputError` for another number of rows than the plan gives this rank.

    It names the documents where they cannot be those of such rows on any rank.
    """
    rows = q.shape[options.seq_dim]
    if rows == plan.lengths[groups.rank]:
        return
    if options.seq_len is None and rows not in plan.lengths:
        plan.mask.check_length(rows * plan.n)
    raise InputError(
        f"q has {rows} local tokens but {type(plan.layout).__name__}(n={plan.n}, "
        f"S={plan.seq_len}) gives rank {groups.rank} {plan.lengths[groups.rank]}; shard with "
        f"shard_sequence first, and give seq_len where ranks hold unequal lengths"
    )


def as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as autocast hands it to SDPA: any floating dtype but float64 becomes its own."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _without(x: Tensor, dim: int) -> list[int]:
    return [size for i, size in enumerate(x.shape) if i != dim]
