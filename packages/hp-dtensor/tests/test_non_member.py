"""A `NonMember` has the metadata of the tensor and raises in computations."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_dtensor import Layout, LayoutError, NonMember, RaggedShard, Replicate, Shard

LAYOUT = Layout((2, 2), (Shard(0), Replicate()), ranks=(4, 5, 6, 7))
ABSENT: Any = NonMember(LAYOUT, (6, 3), torch.float32)

USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "with a tensor": lambda x: x * torch.ones(3),
    "after a tensor": lambda x: torch.ones(3) - x,
    "product": lambda x: torch.ones(2, 6) @ x,
    "function": lambda x: torch.sum(x),
    "function of a list": lambda x: torch.cat([torch.ones(3), x]),
    "keyword": lambda x: torch.sum(input=x),
    "module": lambda x: nn.Linear(3, 2)(x),
    "method": lambda x: x.sum(),
    "attribute": lambda x: x.grad,
    "part": lambda x: x.to_local(),
    "index": lambda x: x[0],
    "truth": lambda x: bool(x),
    "length": lambda x: len(x),
    "loop": lambda x: list(x),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_as_a_tensor_says_where_the_tensor_is(use: str) -> None:
    with pytest.raises(TypeError, match="this rank holds no part") as info:
        USES[use](ABSENT)
    assert "4 to 7 as (S(0), R)" in str(info.value) or "range(4, 8)" in str(info.value)
    assert "redistribute" in str(info.value)
    assert isinstance(info.value, TypeError)


def test_it_has_the_metadata_of_the_other_ranks_and_no_data() -> None:
    assert (ABSENT.layout, ABSENT.shape, ABSENT.dtype) == (LAYOUT, (6, 3), torch.float32)
    assert NonMember(LAYOUT, [6, 3], torch.float32) == ABSENT  # type: ignore[arg-type]
    assert NonMember(LAYOUT, (6, 4), torch.float32) != ABSENT
    assert not hasattr(ABSENT, "data")
    assert not isinstance(ABSENT, torch.Tensor)


def test_it_can_be_copied_and_sent() -> None:
    assert copy.deepcopy(ABSENT) == ABSENT
    assert pickle.loads(pickle.dumps(ABSENT)) == ABSENT
    assert len({ABSENT, copy.copy(ABSENT)}) == 1


def test_a_shape_that_the_layout_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError):
        NonMember(LAYOUT, (), torch.float32)
    with pytest.raises(LayoutError, match="negative"):
        NonMember(LAYOUT, (-1, 3), torch.float32)
    with pytest.raises(LayoutError, match="got 'rows'"):
        NonMember("rows", (4,), torch.float32)  # type: ignore[arg-type]
    runs = Layout((2,), (RaggedShard((0,), (1, 2)),))
    with pytest.raises(LayoutError, match="they must sum to 4"):
        NonMember(runs, (4,), torch.float32)


def test_gradients_do_not_pass_and_backward_names_the_replacement() -> None:
    assert not ABSENT.requires_grad
    with pytest.raises(TypeError, match=r"x\.detach\(\).*torch\.no_grad\(\)"):
        ABSENT.backward()
