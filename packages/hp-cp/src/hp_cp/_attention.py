"""The entry point: local shards in, local shard of the attention out."""

from torch import Tensor

from hp_dtensor import AxisMesh, Collectives, TorchCollectives

from ._heads import heads_to_rows, rows_to_heads
from ._inputs import as_autocast, from_batch_first, one_axis, plan_inputs, to_batch_first
from ._layouts import Layout
from ._masks import MaskSpec
from ._plan import Schedule
from .backends._choose import choose_backend
from .backends._interface import AttentionBackend
from .schedules._gather import Run, gather_attention
from .schedules._local import LocalRun, local_attention


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: AxisMesh,
    *,
    mask: MaskSpec,
    layout: Layout | None = None,
    ulysses_degree: int = 1,
    schedule: Schedule = "gather",
    backend: str | AttentionBackend = "auto",
    scale: float | None = None,
    seq_dim: int = 2,
    head_dim: int = 1,
    seq_len: int | None = None,
    collectives: Collectives | None = None,
) -> Tensor:
    """Return this rank's rows of the attention over the whole sequence, shaped like ``q``.

    q, k and v are this rank's rows, 4-D with the head size last: ``[batch, heads, rows, size]``
    where ``seq_dim=2, head_dim=1``. q may have a multiple of the heads of k and v (grouped
    queries). ``layout`` says which positions the rows are; None means `Contiguous`. ``seq_len`` is
    the length of the whole sequence. None means the local length times the axis size: ranks that
    hold unequal lengths must be given it, or each infers another whole, and collectives that do not
    match hang or abort. Under autocast the inputs are cast as SDPA casts them.

    Over the one axis of ``mesh``: with ``ulysses_degree=1`` one all-gather of k and v (sends from
    rank to rank where lengths differ), and in the backward one all-to-all of their gradients; with
    ``ulysses_degree`` equal to the axis size one all-to-all of q, k, v, one of the output, and both
    again in the backward. The same inputs give the same bits every time, and Ulysses those of one
    process (but for the gradients of k and v with fewer kv heads than ranks).

    Raises `DegreeError`, `LayoutError`, `InputError` or `BackendError`, before any communication:
    on every rank together where all give tensors of equal shape and dtype and the same options. A
    local length that the layout does not give is seen on that rank only, while the others wait.
    """
    axis = one_axis(mesh)
    q, k, v = (as_autocast(x) for x in (q, k, v))
    plan = plan_inputs(
        q,
        k,
        v,
        axis,
        mask=mask,
        layout=layout,
        ulysses_degree=ulysses_degree,
        schedule=schedule,
        seq_dim=seq_dim,
        head_dim=head_dim,
        seq_len=seq_len,
    )
    kernel = choose_backend(backend, plan.kinds, q.device, q.dtype)
    door: Collectives = TorchCollectives() if collectives is None else collectives
    local = LocalRun(causal=mask.causal, backend=kernel, scale=scale)
    q, k, v = (to_batch_first(x, seq_dim, head_dim) for x in (q, k, v))
    if axis.size == 1:
        out = local_attention(q, k, v, local)
    elif ulysses_degree == axis.size:
        q, k, v = rows_to_heads([q, k, v], axis, plan.chunks, door)
        out = heads_to_rows(local_attention(q, k, v, local), axis, plan.chunks, door)
    else:
        run = Run(
            blocks=plan.blocks(axis.index),
            lengths=plan.lengths,
            rank=axis.index,
            axis=axis,
            backend=kernel,
            scale=scale,
            collectives=door,
        )
        out = gather_attention(q, k, v, run)
    return from_batch_first(out, seq_dim, head_dim)
