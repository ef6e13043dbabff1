"""The layers of one model take their rows for those of one cut, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_cp import (
    Auto,
    ContextParallel,
    Contiguous,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Pinned,
    Zigzag,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_dtensor import RecordingCollectives
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import dense_attention, inputs, leaves, with_gradients
from .test_style import Core, rows

DOCUMENTS = (0, 3, 4, 20, 32)
WHOLE = MaskSpec(causal=True, cu_seqlens=DOCUMENTS)
WINDOW = MaskSpec(causal=True, window=3, cu_seqlens=DOCUMENTS)
OTHERS = MaskSpec(causal=True, cu_seqlens=(0, 9, 32))
HALVES = MaskSpec(causal=True, cu_seqlens=(0, 16, 32))
BIDIRECTIONAL = MaskSpec(causal=False, cu_seqlens=DOCUMENTS)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def two_layers(first: Attention, second: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend, mix the heads' sizes in between as a model does, and attend again."""
    between = torch.linspace(-1, 1, 64, dtype=q.dtype).view(8, 8)
    out = torch.tanh(first(q, k, v) @ between) + q
    return second(out, k, out)


def simulated(n: int, call: Callable[[int, RecordingCollectives, Any], Any]) -> list[Any]:
    def rank(rank: int, collectives: SimulatedCollectives) -> Any:
        mesh = collectives.mesh((n,), ("cp",))
        return call(rank, RecordingCollectives(collectives), mesh)

    return SimulatedWorld(n).run(rank)


def of_function(mesh: Any, mask: MaskSpec, layout: Layout, collectives: Any) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(
            q, k, v, mesh, mask=mask, layout=layout, collectives=collectives
        )

    return attend


def of_style(mesh: Any, mask: MaskSpec, layout: Layout, collectives: Any) -> Attention:
    style = ContextParallel(
        seq_dim=1, head_dim=2, ulysses_degree=2, layout=layout, mask=mask, collectives=collectives
    )
    core: nn.Module = style.apply(Core(), mesh)
    return lambda q, k, v: rows(core(*map(rows, (q, k, v))))


def calls_of(record: RecordingCollectives) -> int:
    return sum(traffic.calls for traffic in record.by_axis.values())


@pytest.mark.parametrize(
    ("layout", "masks"),
    [
        (Greedy(2), (WHOLE, WINDOW)),
        (Greedy(2), (WINDOW, WHOLE)),
        (Greedy(2), (WHOLE, BIDIRECTIONAL)),
        (PerDocument(), (MaskSpec(causal=True, cu_seqlens=(0, 8, 32)), HALVES)),
        (Auto(0.0), (MaskSpec(causal=True), MaskSpec(causal=False))),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [of_function, of_style])
def test_layers_that_follow_different_masks_are_refused_on_every_rank_before_communication(
    way: Callable[..., Attention], layout: Layout, masks: tuple[MaskSpec, MaskSpec]
) -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> tuple[str, int, int]:
        q, k, v = shard_sequence(tensors[:3], mesh, layout, 2, masks[0])
        local = leaves(q, k, v)
        first, second = (way(mesh, mask, layout, record) for mask in masks)
        out = first(*local)
        before = calls_of(record)
        with pytest.raises(InputError) as info:
            second(out.relu() + local[0], local[1], local[2])
        return str(info.value), before, calls_of(record)

    answers = simulated(4, call)
    assert len({said for said, *_ in answers}) == 1
    assert f"give every layer Pinned({layout!r}, mask)" in answers[0][0]
    assert all(before == after for _, before, after in answers)


@pytest.mark.parametrize("layout", [Greedy(2), Auto()], ids=repr)
@pytest.mark.parametrize("way", [of_function, of_style])
def test_layers_with_one_pinned_cut_give_the_gradients_of_one_process(
    way: Callable[..., Attention], layout: Layout
) -> None:
    tensors, pinned = inputs(2, 2, 32), Pinned(layout, WHOLE)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> list[Tensor]:
        q, k, v, grad = shard_sequence(tensors, mesh, pinned, 2, WHOLE)
        local = leaves(q, k, v)
        layers = [way(mesh, mask, pinned, record) for mask in (WHOLE, WINDOW)]
        return with_gradients(two_layers(layers[0], layers[1], *local), local, grad)

    whole = leaves(*tensors[:3])
    scale = [lambda q, k, v, m=mask: dense_attention(q, k, v, m) for mask in (WHOLE, WINDOW)]
    expected = with_gradients(two_layers(scale[0], scale[1], *whole), whole, tensors[3])
    indices = pinned.indices(4, 32)
    for held, results in zip(indices, simulated(4, call), strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, list(held)], rtol=0, atol=1e-12)


def test_layers_of_one_mask_batches_of_other_documents_and_rows_cut_anew_are_served() -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> list[Tensor]:
        layout, outs = Greedy(2), []
        for mask in (WHOLE, OTHERS):
            local = leaves(*shard_sequence(tensors[:3], mesh, layout, 2, mask))
            layer = of_function(mesh, mask, layout, record)
            out = two_layers(layer, layer, *local)
            again = unshard_sequence(out, mesh, layout, 2, mask, seq_len=32, collectives=record)
            q, k, v = shard_sequence((again, *tensors[1:3]), mesh, layout, 2, WINDOW)
            outs.append(of_function(mesh, WINDOW, layout, record)(q, k, v))
        return outs

    for results in zip(*simulated(2, call), strict=True):
        assert all(result.requires_grad for result in results)


def test_a_layout_that_follows_no_mask_serves_layers_of_different_masks() -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> Tensor:
        local = leaves(*shard_sequence(tensors[:3], mesh, Zigzag(), 2))
        first, second = (of_function(mesh, mask, Zigzag(), record) for mask in (WHOLE, WINDOW))
        out = two_layers(first, second, *local)
        whole: Tensor = unshard_sequence(out.detach(), mesh, Zigzag(), 2, collectives=record)
        return whole

    first, second = (
        lambda q, k, v, m=mask: dense_attention(q, k, v, m) for mask in (WHOLE, WINDOW)
    )
    expected = two_layers(first, second, *tensors[:3])
    for out in simulated(2, call):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


CAUSAL = MaskSpec(causal=True)


def of_own_forward(mesh: Any, mask: MaskSpec, layout: Layout, collectives: Any) -> Attention:
    """Return the style's attention, by the module's own forward where it is `Contiguous`."""
    style = ContextParallel(seq_dim=1, head_dim=2, layout=layout, collectives=collectives)
    core: nn.Module = style.apply(Core(), mesh)
    return lambda q, k, v: rows(core(*map(rows, (q, k, v)), is_causal=mask.causal))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Zigzag(), Contiguous()),
        (Contiguous(), Zigzag()),
        (Greedy(4), Contiguous()),
        (Greedy(4), Zigzag()),
        (Zigzag(), Greedy(4)),
        (Pinned(Greedy(2), WHOLE), Contiguous()),
        (Zigzag(), Pinned(Greedy(2), WHOLE)),
        (Pinned(Greedy(2), WHOLE), Pinned(Greedy(2), WINDOW)),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [of_function, of_own_forward])
def test_layers_of_different_layouts_are_refused_on_every_rank_before_communication(
    way: Callable[..., Attention], first: Layout, second: Layout
) -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> tuple[str, int, int]:
        local = leaves(*shard_sequence(tensors[:3], mesh, first, 2, CAUSAL))
        layers = [way(mesh, CAUSAL, layout, record) for layout in (first, second)]
        out = layers[0](*local)
        before = calls_of(record)
        with pytest.raises(InputError) as info:
            layers[1](out.relu() + local[0], local[1], local[2])
        return str(info.value), before, calls_of(record)

    answers = simulated(2, call)
    assert len({said for said, *_ in answers}) == 1
    assert f"made of rows that {first!r} cut by" in answers[0][0]
    assert f"but {second!r} cuts otherwise" in answers[0][0]
    assert all(before == after for _, before, after in answers)


def test_keys_of_another_cut_than_that_of_the_queries_are_refused() -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> None:
        zigzag, contiguous = (
            of_function(mesh, CAUSAL, layout, record) for layout in (Zigzag(), Contiguous())
        )
        local = leaves(*shard_sequence(tensors[:3], mesh, Zigzag(), 2))
        q = zigzag(*local)
        k = contiguous(*local).relu().sigmoid()
        with pytest.raises(InputError, match=r"that Contiguous\(\) cut by .* Zigzag\(\) cuts"):
            zigzag(q, k, k)

    simulated(2, call)


@pytest.mark.parametrize("alike_first", [True, False])
def test_a_sum_of_two_branches_of_which_one_has_another_cut_is_refused(alike_first: bool) -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> None:
        zigzag, contiguous = (
            of_function(mesh, CAUSAL, layout, record) for layout in (Zigzag(), Contiguous())
        )
        local = leaves(*shard_sequence(tensors[:3], mesh, Zigzag(), 2))
        alike, other = zigzag(*local), contiguous(*local)
        both = alike + other if alike_first else other + alike
        with pytest.raises(InputError, match=r"that Contiguous\(\) cut by .* Zigzag\(\) cuts"):
            zigzag(both, local[1], local[2])

    simulated(2, call)


class Halves(Contiguous):
    """`Contiguous`, said in more pieces."""

    __slots__ = ()

    def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
        """Return two ranges per rank that touch."""
        held = [piece for (piece,) in super().chunks(n, seq_len, mask)]
        return tuple((piece[: len(piece) // 2], piece[len(piece) // 2 :]) for piece in held)


@pytest.mark.parametrize(
    ("first", "second", "n"),
    [
        (Zigzag(), Greedy(2), 2),
        (Zigzag(), Auto(0.0), 2),
        (Pinned(Zigzag(), WHOLE), Zigzag(), 4),
        (Pinned(Greedy(2), CAUSAL), Greedy(2), 4),
        (Contiguous(), Halves(), 2),
        (Zigzag(), Contiguous(), 1),
        (Greedy(2), Contiguous(), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [of_function, of_own_forward])
def test_equal_cuts_of_different_layouts_serve_one_model(
    way: Callable[..., Attention], first: Layout, second: Layout, n: int
) -> None:
    tensors = inputs(4, 4, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> Tensor:
        local = leaves(*shard_sequence(tensors[:3], mesh, first, 2, CAUSAL))
        layers = [way(mesh, CAUSAL, layout, record) for layout in (first, second)]
        out = two_layers(layers[0], layers[1], *local)
        whole: Tensor = unshard_sequence(out.detach(), mesh, first, 2, CAUSAL, collectives=record)
        return whole

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_attention(q, k, v, CAUSAL)

    assert second.chunks(n, 32, CAUSAL) == first.chunks(n, 32, CAUSAL) or second == Halves()
    expected = two_layers(dense, dense, *tensors[:3])
    for out in simulated(n, call):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def halves(x: Tensor, *_: Any) -> Tensor:
    return x[:, :, ::2] + x[:, :, 1::2]


def mean(x: Tensor, *_: Any) -> Tensor:
    return x.mean(2, keepdim=True).relu()


def read_by_one_query(x: Tensor, *_: Any) -> Tensor:
    return (x.new_ones(1, x.shape[2]) @ x).expand(x.shape)


def gathered(x: Tensor, mesh: Any, collectives: Any) -> Tensor:
    whole: Tensor = unshard_sequence(x, mesh, Zigzag(), 2, collectives=collectives)
    return whole.mean(2, keepdim=True)


def cut_again(x: Tensor, mesh: Any, collectives: Any) -> Tensor:
    whole = unshard_sequence(x, mesh, Zigzag(), 2, collectives=collectives)
    mine: Tensor = shard_sequence(whole, mesh, Contiguous(), 2)
    return mine


def gathered_by_others(x: Tensor, mesh: Any, collectives: Any) -> Tensor:
    """Stand for a gather that this package did not make."""
    mine: Tensor = shard_sequence(torch.cat([x, x.flip(2)], 2), mesh, Contiguous(), 2)
    return mine


@pytest.mark.parametrize(
    "carry", [mean, read_by_one_query, gathered, cut_again, gathered_by_others]
)
def test_what_another_sequence_hands_on_without_its_rows_goes_into_a_sequence_of_another_cut(
    carry: Callable[..., Tensor],
) -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> bool:
        local = leaves(*shard_sequence(tensors[:3], mesh, Zigzag(), 2))
        first = of_function(mesh, CAUSAL, Zigzag(), record)(*local)
        carried = carry(first, mesh, record)
        second = of_function(mesh, CAUSAL, Contiguous(), record)
        q, k, v = (x + carried for x in shard_sequence(tensors[:3], mesh, Contiguous(), 2))
        out = two_layers(second, second, q, k, v)
        return out.requires_grad

    assert simulated(2, call) == [True] * 2


def test_sequences_of_other_lengths_may_be_cut_in_another_way() -> None:
    tensors = inputs(2, 2, 32)

    def call(rank: int, record: RecordingCollectives, mesh: Any) -> None:
        local = leaves(*shard_sequence(tensors[:3], mesh, Contiguous(), 2))
        contiguous, zigzag = (
            of_function(mesh, CAUSAL, layout, record) for layout in (Contiguous(), Zigzag())
        )
        first = contiguous(*local)
        half = zigzag(*[halves(first)] * 3)
        again = half.repeat_interleave(2, 2) + first
        contiguous(again, again, again)
        with pytest.raises(InputError, match="made of rows"):
            zigzag(again, again, again)

    simulated(2, call)
