"""What a forward and backward hold at a time, and between them, in bytes."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hp_cp import Contiguous, Layout, MaskSpec, Zigzag, context_parallel_attention
from hp_dtensor import Axis, Work
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import inputs, leaves
from .test_copies import Carried, Copied, Waited

SEQ, HEADS, SIZE = 512, 2, 32
ITEM = 4  # float32, in which sums are kept too


class Held(Copied):
    """Counts the bytes of memory that was made inside and is held, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and count what is new."""
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in self._known | given:
                self._known.add(storage._cdata)
                weakref.finalize(storage, self._let_go, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def _let_go(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


class Apart(Carried):
    """Collectives that let go of their inputs at once, as of memory that was sent.

    What an all-to-all brings counts as held.
    """

    def all_to_all(self, axis: Axis, input: Tensor, *given: Any, **named: Any) -> Work:
        """Exchange copies."""
        send, receive = given
        output = input.new_empty((sum(receive), *input.shape[1:]))
        with _disable_current_modes():
            copy = input.clone()
            return Waited(self._inner.all_to_all(axis, copy, send, receive, output, **named))

    def all_gather(
        self, axis: Axis, inputs: Sequence[Tensor], outputs: Sequence[Tensor] | None = None
    ) -> Work:
        """Gather copies."""
        with _disable_current_modes():
            return Waited(self._inner.all_gather(axis, [x.clone() for x in inputs], outputs))


def _tensors(value: Any) -> list[Tensor]:
    found, _ = torch.utils._pytree.tree_flatten(value)
    return [x for x in found if isinstance(x, Tensor)]


def held(n: int, layout: Layout, **options: Any) -> list[tuple[float, float, float]]:
    """Return what each rank holds, in keys and values of one rank.

    The most in the forward, then what is left for the backward, which the keys and values
    themselves belong to, and the most in the backward: all without tensors of queries.
    """
    *tensors, grad = (x.transpose(1, 2) for x in inputs(HEADS, HEADS, SEQ, batch=1, size=SIZE))
    rows = SEQ // n * HEADS * SIZE * ITEM

    def rank(rank: int, collectives: SimulatedCollectives) -> tuple[float, float, float]:
        mine = list(layout.indices(n, SEQ)[rank])
        q, k, v = leaves(*(x[:, mine].float() for x in tensors))
        gradient = grad[:, mine].float().contiguous()
        mesh = collectives.mesh((n,), ("cp",))
        with Held() as found:
            made = [k * 1, v * 1]  # as of a layer, which nobody else keeps

            def attend(k: Tensor, v: Tensor) -> Tensor:
                out: Tensor = context_parallel_attention(
                    q,
                    k,
                    v,
                    mesh,
                    mask=MaskSpec(causal=True),
                    layout=layout,
                    seq_dim=1,
                    head_dim=2,
                    seq_len=SEQ,
                    collectives=Apart(collectives, found),
                    **options,
                )
                return out

            out = attend(*made)
            made.clear()
            forward, kept, found.most = found.most, found.now, 0
            torch.autograd.grad(out, (q, k, v), gradient)
        return forward / (2 * rows), kept / (2 * rows), found.most / (2 * rows)

    return SimulatedWorld(n).run(rank)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=repr)
def test_gather_holds_the_gathered_keys_and_their_gradients_once_each(
    layout: Layout, keep: bool, n: int
) -> None:
    out, sums = 0.5, 1 / SIZE
    # The gathered keys have this rank's rows too; under Zigzag in two ranges.
    kept = (n if isinstance(layout, Contiguous) else n + 1) if keep else 1
    for _, left, most in held(n, layout, schedule="gather", keep_kv=keep):
        assert left <= kept + out + sums
        assert most <= 2 * n + (3.5 if keep else 5) + sums  # the rest: own keys, and queries


def test_gradients_of_gathered_keys_come_again_where_the_graph_is_kept() -> None:
    tensors = inputs(4, 2, 16, batch=1)

    def rank(rank: int, collectives: SimulatedCollectives) -> list[list[Tensor]]:
        local = leaves(*(x.chunk(2, 2)[rank] for x in tensors[:3]))
        out = context_parallel_attention(
            *local,
            collectives.mesh((2,), ("cp",)),
            mask=MaskSpec(causal=True),
            layout=Contiguous(),
            schedule="gather",
            seq_len=16,
            collectives=collectives,
        )
        grad = tensors[3].chunk(2, 2)[rank]
        return [
            list(torch.autograd.grad(out, local, grad, retain_graph=keep))
            for keep in (True, True, False)
        ]

    for first, *others in SimulatedWorld(2).run(rank):
        for again in others:
            assert all(map(torch.equal, first, again))
