"""What a forward and backward copies above what travels, in bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention
from hp_dtensor import Axis, Collectives, Work
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

COPIES = {
    *("cat", "clone", "constant_pad_nd", "copy", "flip", "gather", "index", "index_select"),
    *("narrow_copy", "pad", "repeat", "roll", "stack", "take", "to_copy", "where"),
}
N, SEQ, Q_HEADS, KV_HEADS, SIZE = 4, 64, 4, 2, 8
ITEM = 4  # float32, in which sums are kept too
QUERIES = SEQ // N * Q_HEADS * SIZE * ITEM  # bytes of one rank
KEYS = SEQ // N * KV_HEADS * SIZE * ITEM  # bytes of one rank's keys, and of its values
SUMS = SEQ // N * Q_HEADS * ITEM  # bytes of one rank's log-sum-exps
ROWS_FIRST, HEADS_FIRST = (1, 2), (2, 1)  # dims of rows and heads in q, k and v


class Copied(TorchDispatchMode):
    """Counts the bytes that copying operations write: of rows, and of log-sum-exps (3-D)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = self.sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").strip("_")
        if name in COPIES:
            self.count(result)
        return result

    def count(self, written: Tensor) -> None:
        """Add what a copy wrote."""
        if written.ndim == 3:
            self.sums += written.nbytes
        else:
            self.rows += written.nbytes


class Carried:
    """Collectives whose own copies do not count, but those that make inputs dense."""

    def __init__(self, inner: Collectives, copied: Copied) -> None:
        self._inner = inner
        self._copied = copied

    def _given(self, *tensors: Tensor) -> None:
        for x in tensors:
            if not x.is_contiguous():
                self._copied.count(x)

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Gather."""
        self._given(*inputs)
        with _disable_current_modes():
            return Waited(self._inner.all_gather(axis, inputs, outputs))

    def all_to_all(self, axis: Axis, input: Tensor, *given: Any, **named: Any) -> Work:
        """Exchange."""
        self._given(input)
        with _disable_current_modes():
            return Waited(self._inner.all_to_all(axis, input, *given, **named))

    def send_recv(self, axis: Axis, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> Work:
        """Send and receive."""
        for parts in sends.values():
            self._given(*([parts] if isinstance(parts, Tensor) else parts))
        with _disable_current_modes():
            return Waited(self._inner.send_recv(axis, sends, receives))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Waited:
    """A call whose end does not count either."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> list[Tensor]:
        """Wait."""
        with _disable_current_modes():
            return self._work.wait()


def copied(layout: Layout, dims: tuple[int, int], **options: Any) -> list[tuple[int, int]]:
    """Return the bytes of rows and of sums that each rank copied for a batch of one."""
    seq_dim, head_dim = dims
    heads = (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)

    def rank(rank: int, collectives: SimulatedCollectives) -> tuple[int, int]:
        tensors = [torch.randn(1, SEQ // N, h, SIZE).transpose(1, seq_dim) for h in heads]
        *local, grad = (x.contiguous() for x in tensors)
        q, k, v = (x.requires_grad_() for x in local)
        with Copied() as found:
            out = context_parallel_attention(
                q,
                k,
                v,
                collectives.mesh((N,), ("cp",)),
                mask=MaskSpec(causal=True),
                layout=layout,
                seq_dim=seq_dim,
                head_dim=head_dim,
                seq_len=SEQ,
                collectives=Carried(collectives, found),
                **options,
            )
            torch.autograd.grad(out, (q, k, v), grad)
        return found.rows, found.sums

    return SimulatedWorld(N).run(rank)


def packed_by_gather(layout: Layout) -> list[int]:
    """Return the bytes that each rank copies for gather's all-to-all of gradients.

    With Contiguous that includes own keys, whose memory the gradients take. Counted: at most the
    gradients of all keys, and own keys.
    """
    parts = (2, 10, 6, 8) if isinstance(layout, Contiguous) else (7, 6, 5, 8)
    return [KEYS * part for part in parts]


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
@pytest.mark.parametrize("schedule", ["direct", "ring", "double_ring", "gather"])
def test_rows_first_tensors_of_a_batch_of_one_are_attended_and_sent_without_a_copy(
    schedule: str, layout: Layout
) -> None:
    packed = packed_by_gather(layout) if schedule == "gather" else [0] * N
    found = copied(layout, ROWS_FIRST, schedule=schedule)
    assert [rows for rows, _ in found] == packed
    for _, sums in found:
        # A merge writes beside its rows, and then back, so that bits are those of any world.
        assert sums <= (N - 1) * SUMS


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
@pytest.mark.parametrize(("schedule", "passes"), [("direct", 2), ("ring", 2), ("gather", 1)])
def test_heads_first_tensors_are_made_rows_first_once_a_pass_where_they_are_sent(
    schedule: str, passes: int, layout: Layout
) -> None:
    sent = [passes * 2 * KEYS] * N
    if schedule == "direct" and isinstance(layout, Contiguous):
        sent[-1] = 0  # nobody sees the last rows
    packed = packed_by_gather(layout) if schedule == "gather" else [0] * N
    found = [rows for rows, _ in copied(layout, HEADS_FIRST, schedule=schedule)]
    # The gradient of the output, too.
    assert found == [QUERIES + sum(both) for both in zip(sent, packed, strict=True)]


@pytest.mark.parametrize("dims", [ROWS_FIRST, HEADS_FIRST])
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
def test_ulysses_copies_what_it_sends_and_what_comes_in_parts(
    layout: Layout, dims: tuple[int, int]
) -> None:
    heads = QUERIES + 2 * KEYS * N // KV_HEADS  # every rank reads one kv head
    packed = heads + QUERIES + heads  # q, k and v; the output's gradient; dq, dk and dv
    placed = 2 * QUERIES  # the output and dq, which come as some heads from each rank
    if isinstance(layout, Zigzag):  # whose ranks' rows are two ranges of the whole
        packed += QUERIES  # the output
        placed += heads + QUERIES  # q, k and v; the output's gradient
    assert copied(layout, dims, ulysses_degree=N) == [(packed + placed, 0)] * N
