"""The entry point: local shards in, local shard of the attention out."""

from torch import Tensor

from hp_dtensor import AxisMesh, Collectives, TorchCollectives

from ._inputs import (
    as_autocast,
    check_dims,
    check_scale,
    check_tensors,
    from_batch_first,
    plan_inputs,
    to_batch_first,
)
from ._layouts import Layout
from ._masks import MaskSpec
from ._mesh import seats_of
from ._planned import planned_attention
from ._routes import Schedule
from ._torch import keep_eager
from .kernels._choose import choose_backend
from .kernels._interface import AttentionBackend


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
    the whole sequence. None means the local length times the number of ranks: ranks that hold
    unequal lengths must be given it, or each infers another whole, and collectives that do not
    match hang or abort. Under autocast the inputs are cast as SDPA casts them.

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
    """
    door: Collectives = TorchCollectives() if collectives is None else collectives
    check_dims(seq_dim, head_dim)
    check_tensors(q, k, v)
    check_scale(scale)
    seats = seats_of(mesh, ulysses_degree, door)
    q, k, v = (as_autocast(x) for x in (q, k, v))
    plan = plan_inputs(
        q,
        k,
        v,
        seats.n,
        seats.rank,
        mask=mask,
        layout=layout,
        ulysses_degree=ulysses_degree,
        schedule=schedule,
        seq_dim=seq_dim,
        head_dim=head_dim,
        seq_len=seq_len,
        keep_kv=keep_kv,
        load_balance=False,
    )
    kernel = choose_backend(
        backend, plan.kernels, q.device, q.dtype, plan.head_size, regular=plan.regular
    )
    seats.across.connect(q.device)
    q, k, v = (to_batch_first(x, seq_dim, head_dim) for x in (q, k, v))
    out = planned_attention(q, k, v, plan, seats, kernel, scale)
    return from_batch_first(out, seq_dim, head_dim)
