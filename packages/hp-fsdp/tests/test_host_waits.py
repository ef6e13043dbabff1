"""A step asks for no value of a tensor, for which the host of an accelerator would have to wait."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from hp_fsdp._agreement import TagLog
from hp_fsdp._reduction import Reduction
from hp_fsdp._streams import SideStream
from hp_fsdp._unit import unit_of

from .models import WIDTH, Net, make, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]
# Operators with a result or a result shape that the host reads.
READING = (
    "item",
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "masked_scatter",
    "unique",
    "equal",
    "is_nonzero",
    "_assert_async",
)
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class Reads(TorchDispatchMode):
    """Counts operators, mask indexing and tensor methods that make the host read a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and go on."""
        name = func._schema.name.removeprefix("aten::")
        self.seen[name] += 1
        masks = (
            [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if (name in ("index", "index_put", "index_put_", "_index_put_impl_"))
            else []
        )
        if masks or any(name.startswith(each) for each in READING):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class TwoHeads(Net):
    """The net with a padding row in its embedding and a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, padding_idx=3)
        self.other = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, both: bool = True) -> Tensor:
        """Return the logits of the first head, or the sum of both."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.other(x) if both else self.head(x)  # type: ignore[no-any-return]


class Beside(SideStream):
    """A side stream of an accelerator on which every copy has arrived at once."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def after_current(self, what: str = "") -> Iterator[None]:
        """Run the block."""
        yield

    def uses(self, tensor: Tensor) -> None:
        """Do nothing."""

    def begun(self, work: object = None) -> Any:
        """Return a copy that has completed."""
        return mock.Mock(done=True)


def check_tags_as_on_an_accelerator(model: Any) -> None:
    unit: Any = unit_of(model)
    unit.schedule._tag_log = log = TagLog(Beside())
    for group in (group for each in unit.schedule.units for group in each.groups):
        group.tag.log, group.reads_tags = log, True


def reads(rank: int, shape: tuple[int, ...], both: bool, options: dict[str, Any]) -> Counter[str]:
    """Return the reads of the third step. Rank 0 skips the second head unless ``both``."""
    axes = ("dp_replicate", "fsdp")[-len(shape) :]
    model: Any = shard(make(TwoHeads), mesh_of(shape, axes), **options)

    def step() -> None:
        model(tokens(rank), both or rank > 0).pow(2).mean().backward()
        model.zero_grad()

    step()
    check_tags_as_on_an_accelerator(model)
    with mock.patch.object(Reduction, "_reads_tags_early", False):
        step()
    with Reads() as counted, ExitStack() as stack:
        stack.enter_context(mock.patch.object(Reduction, "_reads_tags_early", False))
        for name in METHODS:
            before = getattr(Tensor, name)

            def count(self: Tensor, *args: Any, _name: str = name, _before: Any = before) -> Any:
                counted.found[_name] += 1
                return _before(self, *args)

            stack.enter_context(mock.patch.object(Tensor, name, count))
        step()
    if not counted.seen["addmm"]:
        raise AssertionError("no operator was seen")
    return cast("Counter[str]", counted.found)


def copied_tags(mode: str) -> dict[str, int]:
    """Return the reads of a copy on the CPU: the tags of the step before. Ragged gathers have none.

    On accelerators reductions are other objects, which leave their tags to the log too.
    """
    return {} if "ragged" in mode else {"tolist": 1}


MODES: dict[str, dict[str, Any]] = {
    "copy": {},
    "accumulate": {"grads": "accumulate"},
    "ragged": {"layout": "ragged"},
    "ragged, accumulate": {"layout": "ragged", "grads": "accumulate"},
    "given up": {"reshard_after_forward": True},
    "two dtypes": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    },
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "fewer": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("mode", list(MODES))
def test_a_usual_step_reads_no_value_of_a_tensor(ranks: Ranks, mode: str) -> None:
    shape = (4,) if mode == "fewer" else (2,)
    assert ranks(shape[0]).run(reads, shape, True, MODES[mode]) == [copied_tags(mode)] * shape[0]


@pytest.mark.parametrize("mode", ["copy", "accumulate", "ragged"])
def test_nor_does_one_that_sums_over_replicas(ranks: Ranks, mode: str) -> None:
    assert ranks(4).run(reads, (2, 2), True, MODES[mode]) == [copied_tags(mode)] * 4


@pytest.mark.parametrize("mode", ["copy", "accumulate", "ragged"])
def test_a_rank_that_skipped_a_parameter_reads_the_flags_once(ranks: Ranks, mode: str) -> None:
    tags = copied_tags(mode)
    flags = {"tolist": tags.get("tolist", 0) + 1}
    assert ranks(2).run(reads, (2,), False, MODES[mode]) == [flags, tags]
