"""A sequence around the attention: cut it, put it together, its positions, labels and loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import AutogradCollectives, Axis, AxisMesh, Collectives, TorchCollectives

from ._errors import InputError, described
from ._layouts import (
    Chunks,
    Layout,
    checked_chunks,
    checked_layout,
    lengths_of,
    told_length,
)
from ._lineage import note_anew
from ._masks import MaskSpec, check_mask
from ._mesh import axes_of, check_equal_lengths, check_mesh, place_of
from ._nested import check_tree, each_tensor, map_tensors, share_structure
from ._ranges import overlaps
from ._ulysses import sort_rows

IGNORED = -100  # what torch.nn.functional.cross_entropy leaves out by default


def shard_sequence(
    tree: Any, mesh: AxisMesh, layout: Layout | None, seq_dim: Any, mask: MaskSpec | None = None
) -> Any:
    """Return this rank's positions of every tensor in a tree, as copies.

    Communicates nothing. Every rank passes the same whole tensors.

    Args:
        tree: A tensor, or lists, tuples, mappings, dataclasses and registered pytree types of
            tensors. Containers keep their types. Leaves that are not tensors are returned
            unchanged.
        mesh: Mesh of the ranks that share the sequence, with one or two axes.
        layout: Positions of each rank. None means `Contiguous`.
        seq_dim: Dim of the sequence: one int for all tensors, or a tree of ints with the structure
            of ``tree``.
        mask: Attention mask. Required by layouts that depend on the mask, such as `Greedy`.
            Defaults to None.

    Returns:
        ``tree`` with this rank's positions only. Its tensors are new and contiguous, also if there
        is only one rank.

    Raises:
        InputError: ``tree`` has no tensors, or contains DTensors, arrays of other libraries or
            unknown containers of tensors; a tensor does not have the dim ``seq_dim``; the layout or
            the mask is invalid; or the documents of the mask do not end at the length of the
            sequence. Ranks with equal arguments raise together.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> batch = {"tokens": torch.arange(64)[None], "labels": torch.arange(64)[None]}
        >>> local = shard_sequence(batch, mesh, Zigzag(), seq_dim=1)
        >>> local["tokens"].shape
        torch.Size([1, 16])
    """
    n, rank = place_of(mesh)
    layout = checked_layout(layout)

    def chunks_of(x: Tensor, dim: int) -> Chunks:
        return checked_chunks(layout, n, x.shape[dim], mask)

    def cut(x: Tensor, seq_dim: int) -> Tensor:
        dim = checked_dim(x, seq_dim)
        return note_anew(_cut(x, chunks_of(x, dim)[rank], dim))

    dims = _each_dim(tree, seq_dim)
    for x, dim in _at_dims(tree, dims):
        chunks_of(x, dim)
    return map_tensors(cut, tree, dims)


def unshard_sequence(
    tree: Any,
    mesh: AxisMesh,
    layout: Layout | None,
    seq_dim: Any,
    mask: MaskSpec | None = None,
    *,
    seq_len: int | None = None,
    replicated_loss: bool = False,
    collectives: Collectives | None = None,
) -> Any:
    """Gather every tensor of a tree along the sequence: all ranks get the whole sequence.

    The function is differentiable. Each tensor needs one all-gather per mesh axis. If local lengths
    differ, sends between all ranks replace the all-gather.

    Args:
        tree: Tensors with this rank's positions, in containers as for `shard_sequence`.
        mesh: Mesh of the ranks that share the sequence, as for `shard_sequence`.
        layout: Layout of `shard_sequence`. None means `Contiguous`.
        seq_dim: Dim of the sequence, as for `shard_sequence`.
        mask: Mask of `shard_sequence`. Defaults to None.
        seq_len: Length of the whole sequence, in positions. Defaults to None: the end of the last
            document if the mask has documents, else the local length times the number of ranks. In
            the latter case, ranks compare their lengths as in `context_parallel_attention`.
        replicated_loss: Whether every rank computes the same loss from the whole tensor. Defaults
            to False.

            - True: every rank computes the same loss, as DPO and GRPO do from log-probabilities. In
              the backward, each rank keeps its own positions of the gradient, and nothing is
              communicated. Sum the gradients of parameters over ``mesh``.
            - False: each rank computes a different part of the loss. The backward sums the
              gradients of all ranks: one reduce-scatter per tensor and axis, or one all-to-all if
              lengths differ. If every rank computes the same loss after all, gradients are ``n``
              times too large on ``n`` ranks.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Returns:
        ``tree`` with whole tensors, in the order of positions.

    Raises:
        InputError: Raised in the cases of `shard_sequence`, and in these cases:

            - Documents do not end at ``seq_len``, or ``replicated_loss`` is not a bool. Raised
              before communication.
            - A tensor does not have the length that the layout assigns to this rank. Raised on this
              rank only.
            - Local lengths differ although ``seq_len`` is inferred from them. Raised on all ranks
              after the comparison of lengths.

    Examples:
        On 4 ranks:

        >>> mesh, layout = init_device_mesh("cpu", (4,)), Zigzag()
        >>> log_probs = torch.zeros(2, 16, requires_grad=True)  # this rank's 16 of 64 tokens
        >>> whole = unshard_sequence(
        ...     log_probs, mesh, layout, seq_dim=1, seq_len=64, replicated_loss=True
        ... )
        >>> whole.shape
        torch.Size([2, 64])
        >>> whole.sum().backward()  # then sum the gradients of parameters over the mesh
    """
    if type(replicated_loss) is not bool:
        raise InputError(
            f"replicated_loss={described(replicated_loss)} is no bool; use True if every rank "
            f"computes the same loss from the whole tensor, False if each computes its own part"
        )
    n, rank = place_of(mesh)
    layout = checked_layout(layout)
    if mask is not None:
        check_mask(mask)
    told = told_length(layout, mask) if seq_len is None else seq_len

    def chunks_of(x: Tensor, dim: int) -> Chunks:
        length = x.shape[dim] * n if told is None else told
        return checked_chunks(layout, n, length, mask)

    def whole(x: Tensor, seq_dim: int) -> Tensor:
        dim = checked_dim(x, seq_dim)
        chunks = chunks_of(x, dim)
        lengths = lengths_of(chunks)
        if replicated_loss:
            gathered = _gathered(x.detach(), mesh, lengths, dim, collectives)
            before, after = sum(lengths[:rank]), sum(lengths[rank + 1 :])
            first, _, last = gathered.split([before, lengths[rank], after], dim)
            gathered = torch.cat([first, x, last], dim)  # the only part with a gradient
        else:
            gathered = _gathered(x, mesh, lengths, dim, collectives)
        return sort_rows(note_anew(gathered), chunks, dim)

    dims = _each_dim(tree, seq_dim)
    found = _at_dims(tree, dims)
    collectives = TorchCollectives() if collectives is None else collectives

    def compare() -> None:
        if told is None and found:
            lengths = tuple(x.shape[dim] for x, dim in found)
            check_equal_lengths(axes_of(mesh)[::-1], lengths, found[0][0].device, collectives)

    try:
        given = [(x, dim, chunks_of(x, dim)) for x, dim in found]
    except InputError:
        if told is None:
            checked_chunks(layout, n, 0, mask)  # fails on every rank where no length would serve
        compare()  # others may have no error
        raise
    compare()
    for x, dim, chunks in given:  # all of them before the first is gathered
        if x.shape[dim] != lengths_of(chunks)[rank]:
            raise InputError(
                f"dim {dim} of {tuple(x.shape)} is not what {type(layout).__name__}(n={n}, "
                f"S={sum(lengths_of(chunks))}) gives rank {rank}, {lengths_of(chunks)[rank]}; give "
                f"seq_len where ranks hold unequal lengths"
            )
    return map_tensors(whole, tree, dims)


@contextmanager
def sharded_buffers(
    mesh: AxisMesh,
    buffers: Sequence[Tensor],
    seq_dims: int | Sequence[int],
    *,
    layout: Layout | None = None,
    mask: MaskSpec | None = None,
    keep: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Shard tensors in place along the sequence inside a ``with`` block.

    Use this context manager for inputs, and for tensors that a model holds, such as tables of
    rotary embeddings. Inside the block, each buffer is the same tensor object, but it has this
    rank's positions only, in new contiguous memory. After the block, also after an exception, each
    buffer has its whole memory again, unchanged. Communicates nothing.

    Args:
        mesh: Mesh of the ranks that share the sequence, as for `shard_sequence`.
        buffers: Plain dense tensors without gradients, whole and the same on every rank.
        seq_dims: Dim of the sequence: one int for all buffers, or one int for each.
        layout: Positions of each rank. Defaults to None: `Contiguous`.
        mask: Attention mask. Required by layouts that depend on the mask, such as `Greedy`.
            Defaults to None.
        keep: Tensors of ``buffers`` that stay sharded after the block. Their whole memory is freed.
            If sharding fails, these tensors are restored too. Defaults to an empty tuple.

    Yields:
        Nothing. Use the buffers.

    Raises:
        InputError: Raised before any buffer changes if ``buffers`` is not a list or tuple; a buffer
            is not a plain dense tensor, requires gradients, is listed twice, shares memory with
            another buffer, is sharded by an enclosing block or does not have its sequence dim;
            ``seq_dims`` and ``buffers`` have different lengths; ``keep`` has a tensor that is not
            in ``buffers``; or the layout or the mask is invalid, as in `shard_sequence`.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> tokens, rope = torch.zeros(2, 64), torch.zeros(64, 8)
        >>> with sharded_buffers(mesh, [tokens, rope], [1, 0], layout=Zigzag()):
        ...     tokens.shape, rope.shape
        (torch.Size([2, 16]), torch.Size([16, 8]))
        >>> tokens.shape
        torch.Size([2, 64])

    Note:
        Run the backward inside the block: outside, torch raises an error for tensors that changed
        in place. Views that were created before the block stay whole.
    """
    n, rank = place_of(mesh)
    layout = checked_layout(layout)
    _check_buffers(buffers)
    buffers = tuple(buffers)
    kept = _indices_of(keep if isinstance(keep, Tensor) else tuple(keep), buffers)
    dims = _dims_of(buffers, seq_dims)
    chunks = [
        checked_chunks(layout, n, x.shape[dim], mask)[rank]
        for x, dim in zip(buffers, dims, strict=True)
    ]
    with torch.no_grad():
        parts = [_cut(*given) for given in zip(buffers, chunks, dims, strict=True)]
        wholes = {i: x.detach() for i, x in enumerate(buffers)}
    try:
        with torch.no_grad():
            for x, part in zip(buffers, parts, strict=True):
                x.set_(part)  # type: ignore[call-overload]
                setattr(x, _CUT, True)
        for i in kept:
            del wholes[i]
        yield
    finally:
        with torch.no_grad():
            for i, whole in wholes.items():
                buffers[i].set_(whole)  # type: ignore[call-overload]
        for x in buffers:
            vars(x).pop(_CUT, None)


_CUT = "_rows_of_this_rank"  # an attribute of buffers while they are cut


def _check_buffers(buffers: object) -> None:
    """Raise `InputError` for buffers that cannot be cut in place, or not without a trace."""
    if not isinstance(buffers, (list, tuple)):
        raise InputError(f"buffers must be a list of tensors, got {described(buffers)}")
    for i, x in enumerate(buffers):
        if fault := _fault_of(x):
            raise InputError(
                f"buffer {i} {fault}; list plain dense tensors that are whole and take no "
                f"gradient, and cut others with shard_sequence"
            )
    memory: dict[int, int] = {}
    for i, x in enumerate(buffers):
        place = x.untyped_storage().data_ptr() or -i - 1  # 0 is that of no memory
        j = memory.setdefault(id(x) if place < 0 else place, i)
        if j != i:
            shared = "are one tensor" if buffers[j] is x else "share memory"
            raise InputError(
                f"buffers {j} and {i} {shared}, which they would not inside; list each tensor "
                f"once, and give a copy of what is a view, x.clone()"
            )


def _fault_of(x: object) -> str | None:
    """Return why a buffer cannot be cut in place."""
    if not isinstance(x, Tensor):
        return f"is no tensor, but {described(x)}"
    if isinstance(x, nn.Parameter):
        return f"is a parameter of shape {tuple(x.shape)}"
    if type(x) is not Tensor or x.layout is not torch.strided:
        return f"is a {type(x).__name__} with layout {x.layout}"
    if x.requires_grad:
        return f"of shape {tuple(x.shape)} requires gradients"
    if x.is_inference() and not torch.is_inference_mode_enabled():
        return f"of shape {tuple(x.shape)} was made in inference mode, where alone it can change"
    if _CUT in vars(x):
        return f"of shape {tuple(x.shape)} is cut by an enclosing block"
    return None


def _dims_of(buffers: Sequence[Tensor], seq_dims: object) -> list[int]:
    """Return the dim of each buffer's sequence, from 0."""
    dims = list(seq_dims) if isinstance(seq_dims, (list, tuple)) else [seq_dims] * len(buffers)
    if len(dims) != len(buffers):
        raise InputError(
            f"seq_dims={seq_dims!r} has {len(dims)} dims for {len(buffers)} buffers; give one for "
            f"each, or an int for all"
        )
    return [checked_dim(x, dim) for x, dim in zip(buffers, dims, strict=True)]


def _indices_of(keep: Iterable[Tensor], buffers: Sequence[Tensor]) -> set[int]:
    """Return the places of the buffers that stay cut."""
    if isinstance(keep, Tensor):
        raise InputError("keep must be a list of tensors, got a tensor; use keep=[x]")
    places = {id(x): i for i, x in enumerate(buffers)}
    for x in keep:
        if id(x) not in places:
            raise InputError(
                f"keep holds {described(x)} that is none of the buffers; list it there too"
            )
    return {places[id(x)] for x in keep}


def position_ids(
    mesh: AxisMesh,
    layout: Layout | None,
    seq_len: int,
    mask: MaskSpec | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of this rank's rows, for example for rotary embeddings.

    Positions count from the start of the sequence, or from the start of each document if the mask
    has documents. Communicates nothing.

    Args:
        mesh: Mesh of the ranks that share the sequence, as for `shard_sequence`.
        layout: Layout of `shard_sequence`. None means `Contiguous`.
        seq_len: Length of the whole sequence, in positions.
        mask: Attention mask. Required if there are documents, and by layouts that depend on the
            mask. Defaults to None.
        device: Device of the result. Defaults to torch's default device.

    Returns:
        int64 tensor ``[local positions]``. If the mask has separate documents for each row of the
        batch, ``[batch, local positions]``.

    Raises:
        InputError: The mesh, the layout, the mask or the length is invalid. Ranks with equal
            arguments raise together.

    Examples:
        On 4 ranks:

        >>> mesh, mask = init_device_mesh("cpu", (4,)), MaskSpec(causal=True, cu_seqlens=(0, 5, 8))
        >>> whole = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])  # each document counts from 0
        >>> part = shard_sequence(whole, mesh, Zigzag(), seq_dim=0)
        >>> torch.equal(position_ids(mesh, Zigzag(), 8, mask), part)
        True
    """
    n, rank = place_of(mesh)
    chunks = checked_chunks(layout, n, seq_len, mask)
    whole = MaskSpec(causal=True) if mask is None else mask
    found = []
    for row in whole.rows:
        documents, parts = row.documents(seq_len), [torch.arange(0, device=device)]
        for _, i, part in overlaps(chunks[rank], documents):
            start = documents[i].start
            parts.append(torch.arange(part.start - start, part.stop - start, device=device))
        found.append(torch.cat(parts))
    return torch.stack(found) if whole.per_row else found[0]


def _cut(x: Tensor, chunks: tuple[range, ...], dim: int) -> Tensor:
    parts = [x.narrow(dim, chunk.start, len(chunk)) for chunk in chunks] or [x.narrow(dim, 0, 0)]
    return torch.cat(parts, dim).contiguous()  # which is a copy of a single part too


def _gathered(
    x: Tensor, mesh: AxisMesh, lengths: tuple[int, ...], dim: int, collectives: Collectives | None
) -> Tensor:
    """Return the rows of all ranks in rank order, gathered over the last axis first."""
    *outer, inner = axes_of(mesh)
    graded = AutogradCollectives(collectives)
    if not outer:
        return graded.all_gather(x, inner, dim, sizes=lengths)
    groups = [lengths[i : i + inner.size] for i in range(0, len(lengths), inner.size)]
    x = graded.all_gather(x, inner, dim, sizes=groups[outer[0].index])
    return graded.all_gather(x, outer[0], dim, sizes=list(map(sum, groups)))


def _each_dim(tree: Any, seq_dim: Any) -> Any:
    """Return a tree of dims for ``tree``, all of whose tensors are found."""
    check_tree(tree)
    if type(seq_dim) is int:
        return map_tensors(lambda x: seq_dim, tree)
    if not share_structure(tree, seq_dim):
        raise InputError(
            f"seq_dim={seq_dim!r} is not built as the tensors are; give one int for all, or the "
            f"same containers with an int for every leaf"
        )
    return seq_dim


def _at_dims(tree: Any, dims: Any) -> list[tuple[Tensor, int]]:
    """Return all tensors of ``tree`` with the dim of their sequence, from 0."""
    return [(x, checked_dim(x, dim)) for x, dim in each_tensor(tree, dims)]


def checked_dim(x: Tensor, seq_dim: object) -> int:
    """Return the dim of ``x`` that ``seq_dim`` means, or raise `InputError` where there is none.

    A DTensor is refused.
    """
    check_local("the tensor", x)
    if type(seq_dim) is not int or not -x.ndim <= seq_dim < x.ndim:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)} has no dim {seq_dim!r} for the sequence; use one "
            f"of {list(range(-x.ndim, x.ndim))}"
        )
    return seq_dim % x.ndim


def check_local(name: str, x: object) -> None:
    """Raise `InputError` for a DTensor."""
    if isinstance(x, DTensor):
        raise InputError(
            f"{name} is a DTensor with {x.placements}; pass a plain tensor, as x.to_local() of "
            f"this rank's part or x.full_tensor() of the whole"
        )


def shift_labels(
    labels: Tensor, mask: MaskSpec | None = None, *, seq_dim: int = -1, ignored: int = IGNORED
) -> Tensor:
    """Shift labels to the left by one, so that each position has the label of the next token.

    Call this function on whole sequences, before `shard_sequence`: the next token of a rank's last
    position is on another rank. The last position of each document gets the label ``ignored``.

    Args:
        labels: Labels of whole sequences, of any shape with the sequence at ``seq_dim``. If the
            mask has separate documents for each row of the batch, the shape has to be
            ``[batch, sequence]`` or ``[sequence, batch]``.
        mask: Mask with the documents. Defaults to None: one document.
        seq_dim: Dim of the sequence. Defaults to -1.
        ignored: Label that the loss ignores. Defaults to -100, as in ``cross_entropy``.

    Returns:
        A new tensor with the shape and dtype of ``labels``.

    Raises:
        InputError: ``labels`` is not a plain tensor, does not have the dim ``seq_dim``, or has
            another number of rows than the mask; the dtype of ``labels`` cannot hold ``ignored``;
            or ``mask`` is not a `MaskSpec` for this length. Ranks with equal arguments raise
            together.

    Examples:
        >>> shift_labels(torch.tensor([1, 2, 3, 4]), MaskSpec(causal=True, cu_seqlens=(0, 2, 4)))
        tensor([   2, -100,    4, -100])
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a tensor, got {described(labels)}; use torch.tensor(...)")
    dim = checked_dim(labels, seq_dim)
    _check_ignored(labels.dtype, ignored)
    whole = MaskSpec(causal=True) if mask is None else mask
    check_mask(whole)
    shifted, rows = labels.roll(-1, dim), whole.rows
    parts: Sequence[Tensor] = [shifted]
    if whole.per_row:
        if labels.ndim != 2 or labels.shape[1 - dim] != len(rows):
            raise InputError(
                f"labels of shape {tuple(labels.shape)} are not {len(rows)} rows, of which "
                f"cu_seqlens have the documents; give labels [{len(rows)}, sequence]"
            )
        parts, dim = shifted.unbind(1 - dim), 0
    for part, row in zip(parts, rows, strict=True):
        ends = [document.stop - 1 for document in row.documents(part.shape[dim])]
        last = torch.tensor(ends, dtype=torch.int64, device=labels.device)
        part.index_fill_(dim, last, ignored)
    return shifted


def _check_ignored(dtype: torch.dtype, ignored: object) -> None:
    if not isinstance(ignored, (int, float)):
        raise InputError(f"ignored={described(ignored)} is no label; give a number, as {IGNORED}")
    if dtype.is_floating_point or dtype.is_complex:
        return
    least, most = (
        (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    )
    if not (least <= ignored <= most and ignored == int(ignored)):
        raise InputError(
            f"ignored={ignored} is no {dtype}, and would become a label; give labels as int64, or "
            f"an ignored from {least} to {most}"
        )


def cp_loss(
    loss_sum: Tensor,
    n_tokens: int | Tensor,
    loss_mesh: AxisMesh,
    *,
    collectives: Collectives | None = None,
) -> Tensor:
    """Divide this rank's loss sum by the number of tokens of all ranks.

    The results of all ranks add up to the mean loss. Sum the gradients of parameters over
    ``loss_mesh``; do not average them. Communicates one all-reduce of the token count per axis,
    outside autograd.

    Args:
        loss_sum: Sum of the loss over this rank's counted tokens.
        n_tokens: Number of these tokens, as an int or an integer tensor with one element.
        loss_mesh: Mesh of all ranks that hold different tokens: context parallel and data parallel.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Returns:
        ``loss_sum`` divided by the number of tokens of all ranks. If no rank has tokens, the result
        is ``loss_sum``.

    Raises:
        InputError: ``loss_sum`` is not a plain tensor, ``loss_mesh`` is not a mesh, or ``n_tokens``
            is not an int or an integer tensor of at least 0. Raised on this rank before
            communication. Ranks with valid arguments wait.

    Examples:
        On 4 ranks:

        >>> mesh = init_device_mesh("cpu", (4,))
        >>> logits, labels = torch.randn(6, 10), torch.tensor([1, 2, -100, 4, 5, 6])
        >>> loss_sum = nn.functional.cross_entropy(logits, labels, reduction="sum")
        >>> loss = cp_loss(loss_sum, (labels != -100).sum(), mesh)  # this rank's share
        >>> torch.allclose(loss, loss_sum / 20)  # 4 ranks with 5 labels each
        True
    """
    if not isinstance(loss_sum, Tensor):
        raise InputError(
            f"loss_sum must be a tensor, got {described(loss_sum)}; use cross_entropy(..., "
            f"reduction='sum')"
        )
    check_local("loss_sum", loss_sum)
    check_local("n_tokens", n_tokens)
    check_mesh(loss_mesh)
    _check_count(n_tokens)
    collectives = TorchCollectives() if collectives is None else collectives
    count = _own_count(n_tokens, loss_sum.device)
    for position in range(loss_mesh.ndim):
        collectives.all_reduce(Axis.of(loss_mesh, position), [count]).wait()
    return loss_sum / count.clamp_(min=1)


def count_labels(
    microbatches: Any,
    loss_mesh: AxisMesh,
    *,
    ignored: int = IGNORED,
    collectives: Collectives | None = None,
) -> Tensor:
    """Count the labels of the whole batch, over all microbatches and all ranks.

    This number is the denominator of each rank's share of the mean loss: divide the sum of the
    losses of each microbatch by it, or pass it to a model of transformers as
    ``num_items_in_batch``. Communicates one all-reduce of one integer per axis. The host does not
    wait for the result.

    Args:
        microbatches: Labels of this rank for one step: one microbatch, or a list or tuple of all
            microbatches of the step. A microbatch is an integer tensor of any shape from
            `shift_labels`, or a mapping with such a tensor as ``shift_labels``, which
            `hp_cp.transformers.shard_batch` returns.
        loss_mesh: Mesh of all ranks that hold different tokens: context parallel and data parallel.
            In hp-mesh this is ``mesh["loss"]``.
        ignored: Label that does not count. Defaults to -100, as in ``cross_entropy``.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.

    Returns:
        An int64 tensor without dims, on the device of the labels, equal on all ranks. It is at
        least 1, so that a batch without labels has the loss 0 and not NaN.

    Raises:
        InputError: There is no microbatch; a microbatch is neither an integer tensor nor a mapping
            with ``shift_labels``, or is a DTensor; or ``loss_mesh`` is not a mesh. Raised on this
            rank before communication. Ranks with valid arguments wait.

    Examples:
        On 4 ranks, with two microbatches of 3 labels each:

        >>> mesh, labels = init_device_mesh("cpu", (4,)), torch.tensor([1, 2, -100, 4])
        >>> count_labels([labels, labels], mesh)
        tensor(24)
    """
    check_mesh(loss_mesh)
    given = microbatches if isinstance(microbatches, (list, tuple)) else [microbatches]
    if not given:
        raise InputError(
            "microbatches is empty; give the labels of at least one microbatch, on every rank"
        )
    labels = [_labels_of(microbatch) for microbatch in given]
    collectives = TorchCollectives() if collectives is None else collectives
    count = torch.stack([(x.detach() != ignored).sum() for x in labels]).sum()
    for position in range(loss_mesh.ndim):
        collectives.all_reduce(Axis.of(loss_mesh, position), [count]).wait()
    return count.clamp_(min=1)


def _labels_of(microbatch: object) -> Tensor:
    labels = microbatch
    if isinstance(microbatch, Mapping):
        labels = microbatch.get("shift_labels")
        if labels is None:
            raise InputError(
                f"a microbatch with {sorted(map(str, microbatch))} has no shift_labels; give what "
                f"shard_batch returns, or shift_labels(labels)"
            )
    check_local("a microbatch", labels)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = f"a tensor of {labels.dtype}" if isinstance(labels, Tensor) else described(labels)
        raise InputError(
            f"a microbatch is {kind}; give an integer tensor of labels from shift_labels, or a "
            f"mapping with shift_labels"
        )
    return labels


def _own_count(n_tokens: int | Tensor, device: torch.device) -> Tensor:
    """Return a new count without dims; an int is filled in, where a copy would wait."""
    if isinstance(n_tokens, Tensor):
        return n_tokens.detach().to(device, torch.int64, copy=True).reshape(())
    return torch.full((), n_tokens, device=device, dtype=torch.int64)


def _check_count(n_tokens: object) -> None:
    if isinstance(n_tokens, Tensor):
        counts = n_tokens.numel() == 1 and not (
            n_tokens.is_floating_point() or n_tokens.is_complex() or n_tokens.dtype == torch.bool
        )
        given = f"a tensor of {n_tokens.dtype} and shape {tuple(n_tokens.shape)}"
    else:
        counts = type(n_tokens) is int and n_tokens >= 0
        given = repr(n_tokens)
    if not counts:
        raise InputError(
            f"n_tokens is {given}; give the number of counted tokens, an int or an integer tensor "
            f"of one element, at least 0, as (labels != {IGNORED}).sum()"
        )
