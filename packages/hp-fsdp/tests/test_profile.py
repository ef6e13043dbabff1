"""Names of collectives in a profile: the operation, the module and the mesh axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from .models import Net, loss_of, make, mesh_of, shard, tokens

Ranks = Callable[[int], RankPool]
MODULES = ("blocks.0", "blocks.1", "blocks.2", "(root)")


def names(rank: int, shape: tuple[int, ...]) -> set[str]:
    axes = ("dp_replicate", "fsdp")[-len(shape) :]
    model: Any = shard(make(Net), mesh_of(shape, axes))
    loss_of(model, tokens(rank)).backward()
    with torch.profiler.profile() as profiler:
        loss_of(model, tokens(rank)).backward()
    return {e.key for e in profiler.key_averages() if e.key.startswith("hp_fsdp.")}


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
def test_a_profile_names_the_module_and_the_axis_of_each_call(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    expected = {
        f"hp_fsdp.{what} {module}{over}"
        for module in MODULES
        for what, over in (
            *(("all_gather", " over fsdp"), ("wait_all_gather", ""), ("register_unsharded", "")),
            *(
                ("pack_gradients", ""),
                ("reduce_scatter", " over fsdp"),
                ("wait_reduce_scatter", ""),
            ),
            *([("all_reduce", " over dp_replicate"), ("wait_all_reduce", "")] * (len(shape) > 1)),
        )
    }
    for found in ranks(torch.Size(shape).numel()).run(names, shape):
        assert found == expected


def after_a_part(rank: int) -> set[str]:
    """Return the names in a step of the root after one of a part that was called alone."""
    model: Any = shard(make(Net), mesh_of((2,), ("fsdp",)))
    model.blocks[1](torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    with torch.profiler.profile() as profiler:
        loss_of(model, tokens(rank)).backward()
    return {e.key for e in profiler.key_averages() if e.key.startswith("hp_fsdp.")}


def test_a_unit_that_ran_alone_first_has_its_path_from_the_root(ranks: Ranks) -> None:
    for found in ranks(2).run(after_a_part):
        packed = {name for name in found if "pack_gradients" in name}
        assert packed == {f"hp_fsdp.pack_gradients {module}" for module in MODULES}
