"""A ragged tensor has no memory besides its part; writes to either are seen by autograd."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from hp_dtensor import Layout, RaggedShard, RaggedTensor

from .test_ragged import Ragged, mesh_of, part_of, ragged_of, whole

Pools = Callable[[int], RankPool]
UNEVEN = Ragged(Layout((4,), (RaggedShard((0,), (5, 1, 0, 4)),)), (10, 3))


def refused(rank: int) -> list[str]:
    x: Any = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    alone = RaggedTensor.from_local(
        torch.ones(1 - min(rank, 1)), mesh_of((4,)), [RaggedShard((0,), (1, 0, 0, 0))], shape=(1,)
    )
    module = nn.Module()
    module.register_parameter("x", nn.Parameter(x))
    calls: list[Callable[[], Any]] = [
        lambda: x.untyped_storage(),
        lambda: x.storage(),
        lambda: x.share_memory_(),
        lambda: x.is_shared(),
        lambda: module.share_memory(),
        lambda: x.__dlpack__(),
        lambda: from_dlpack(x),
        lambda: x.numpy(),
        lambda: x.numpy(force=True),
        lambda: np.asarray(x),
        lambda: x.tolist(),
        lambda: x.apply_(lambda value: value),
        lambda: x.map_(x, lambda a, b: a),
        lambda: x.set_(torch.ones(10, 3, dtype=torch.double)),
        lambda: x.set_(),
        lambda: x.resize_(3, 3),
        lambda: x.resize_as_(torch.ones(2, dtype=torch.double)),
        lambda: x.t_(),
        lambda: x.as_strided_((2,), (1,)),
        lambda: x.pin_memory(),
        lambda: alone.item(),
        lambda: float(alone),
        lambda: bool(alone),
        lambda: setattr(x, "data", torch.ones(10, 3)),
        lambda: setattr(x, "data", alone),
    ]
    texts = []
    for call in calls:
        with pytest.raises(TypeError) as info:
            call()
        texts.append(str(info.value).partition(" set to ")[2] or str(info.value))
    assert torch.equal(x.to_local(), part_of(whole(UNEVEN.shape), UNEVEN, rank))
    return texts[:-2]


def test_operators_on_memory_raise_on_every_rank(ranks: Pools) -> None:
    first, *others = ranks(4).run(refused)
    assert others == [first] * 3
    assert all("to_local()" in text for text in first)


def looked_at(rank: int) -> tuple[int, tuple[int, ...], int, int]:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    return x.data_ptr(), x.stride(), x.nbytes, x.element_size()


def test_sizes_describe_the_whole_tensor_and_the_address_is_none(ranks: Pools) -> None:
    """torch takes address 0 for a tensor of tensors: it clones such ones instead of storages."""
    assert ranks(4).run(looked_at) == [(0, (3, 1), 240, 8)] * 4


def replaced(rank: int) -> tuple[Tensor, Tensor]:
    """Set ``data`` to a tensor with the same layout. Return both parts after a write."""
    x: Any = ragged_of(whole(UNEVEN.shape), UNEVEN, rank).requires_grad_()
    y = ragged_of(whole(UNEVEN.shape, 2), UNEVEN, rank)
    x.data = y
    with torch.no_grad():
        x.mul_(2)
    return x.to_local().detach(), y.to_local()


@pytest.mark.nccl
def test_set_data_shares_memory(ranks: Pools) -> None:
    for rank, (mine, given) in enumerate(ranks(4).run(replaced)):
        assert torch.equal(mine, 2 * part_of(whole(UNEVEN.shape, 2), UNEVEN, rank))
        assert torch.equal(mine, given)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda x: x.mul_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "lists": lambda x: torch._foreach_mul_([x], 2.0),
    "copy": lambda x: x.copy_(x + 1),
    "mask": lambda x: x.__setitem__(x > -10, 0.0),
}
SAVED: list[Callable[[Any], Any]] = [lambda x: x.to_local() ** 2, lambda x: (x * x).to_local()]


def written(rank: int) -> list[str]:
    """Return the errors of backward after in-place writes to saved tensors."""
    texts = []
    for write in WRITES.values():
        for saved in SAVED:
            x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank).requires_grad_()
            loss = saved(x).sum()
            with torch.no_grad():
                write(x)
            with pytest.raises(RuntimeError, match="modified") as info:
                loss.backward()
            texts.append(str(info.value))
    return texts


def test_a_write_after_autograd_saved_tensor_or_part_is_an_error(ranks: Pools) -> None:
    for texts in ranks(4).run(written):
        assert len(texts) == 2 * len(WRITES)


def local_written(rank: int) -> bool:
    """A part that has a gradient is written to; afterwards one that has none."""
    x: Any = ragged_of(whole(UNEVEN.shape), UNEVEN, rank).requires_grad_()
    y = x * 1
    with pytest.raises(RuntimeError, match="view"):
        y.to_local().mul_(2)
    with torch.no_grad():
        y.to_local().mul_(2)
    free = y.detach()
    free.to_local().mul_(2)
    return torch.equal(y.to_local(), 4 * x.to_local())


def test_a_part_with_a_gradient_is_written_to_without_grad_only(ranks: Pools) -> None:
    assert all(ranks(4).run(local_written))


def identities(rank: int) -> list[bool]:
    """Return whether in-place operators return their argument."""
    x, y = (ragged_of(whole(UNEVEN.shape, seed), UNEVEN, rank) for seed in (1, 2))
    twin = x.like(x.to_local())
    exponent = torch.empty_like(x, dtype=torch.int32)
    mantissa = torch.empty_like(x)
    got = torch.frexp(y, out=(mantissa, exponent))
    return [
        x.add_(y) is x,
        torch.mul(y, 2, out=x) is x,
        got[0] is mantissa,
        got[1] is exponent,
        twin.mul_(x) is twin,
        torch.equal(twin.to_local(), x.to_local()),
    ]


def test_in_place_operators_return_the_written_tensor(ranks: Pools) -> None:
    assert ranks(4).run(identities) == [[True] * 6] * 4


def plain_targets(rank: int) -> list[str]:
    x = ragged_of(whole(UNEVEN.shape), UNEVEN, rank)
    target = torch.zeros((), dtype=torch.double)
    texts = []
    calls: list[Callable[[], Any]] = [
        lambda: torch.mul(x, 2, out=target),
        lambda: target.add_(x),
    ]
    for call in calls:
        with pytest.raises(TypeError) as info:
            call()
        texts.append(str(info.value))
    assert target.shape == ()
    return texts


def test_a_plain_tensor_is_not_written_to(ranks: Pools) -> None:
    first, *others = ranks(4).run(plain_targets)
    assert others == [first] * 3
    assert all("that are not written to" in text for text in first)
