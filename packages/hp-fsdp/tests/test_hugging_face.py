"""A Llama of transformers, as accelerate shards, trains, saves and loads it.

accelerate calls torch's `fully_shard`; with this package's in its place it is to do the same.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as theirs
from rank_pool import RankPool
from torch import Tensor

from hp_fsdp import UnsupportedError, fully_shard

from .models import Gradients, gradients, mesh_of, parameters, worst

Ranks = Callable[[int], RankPool]
transformers = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")
MICROBATCHES = 2


class Trained(NamedTuple):
    """Results of a run of four steps with a restart after the second step."""

    losses: list[float]
    norms: list[float]
    restored: bool
    first: Gradients
    last: Gradients


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randint(50, (2, 17), generator=generator)


@contextmanager
def accelerator(rank: int, world: int) -> Iterator[Any]:
    """Yield one for FSDP on CPUs, which accelerate's own launcher does not offer."""
    state, utils = accelerate.state, accelerate.utils
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    named = {name: str(value) for name, value in where.items()}
    with mock.patch.dict(os.environ, {**named, "ACCELERATE_USE_CPU": "true"}):
        made = accelerate.Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=MICROBATCHES
        )
        for each in (made.state, state.PartialState()):
            each.distributed_type = utils.DistributedType.FSDP
        made.state.fsdp_plugin = plugin
        try:
            yield made
        finally:
            for kind in (state.AcceleratorState, state.PartialState, state.GradientState):
                kind._reset_state()


def trained(rank: int, world: int, by: str, tied: bool, folder: str) -> Trained:
    with (
        mock.patch.object(
            theirs, "fully_shard", fully_shard if by == "ours" else theirs.fully_shard
        ),
        accelerator(rank, world) as made,
    ):
        model = llama(tied)
        model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses, norms = [], []
        first: Gradients = {}

        def steps(numbers: range) -> None:
            for number in numbers:
                with made.accumulate(model):
                    ids = batch(rank, number)
                    loss = model(input_ids=ids, labels=ids).loss
                    made.backward(loss)
                    losses.append(loss.item())
                    if made.sync_gradients:
                        first.update({} if first else gradients(model))
                        norms.append(float(made.clip_grad_norm_(model.parameters(), 0.5)))
                    optimizer.step()
                    optimizer.zero_grad()

        steps(range(4))
        made.save_state(folder)
        kept = parameters(model)
        steps(range(4, 8))
        before = losses[4:], norms[2:], parameters(model)
        made.load_state(folder)
        restored = all(torch.equal(kept[name], p) for name, p in parameters(model).items())
        del losses[4:], norms[2:]
        steps(range(4, 8))
        last = parameters(model)
        again = (losses[4:], norms[2:]) == before[:2]
        same = all(torch.equal(before[2][name], p) for name, p in last.items())
        return Trained(losses, norms, restored and again and same, first, last)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_accelerate_trains_saves_and_loads_with_the_bits_of_torch(ranks: Ranks, tied: bool) -> None:
    found = {}
    for by in ("torch", "ours"):
        with tempfile.TemporaryDirectory() as folder:
            found[by] = ranks(2).run(trained, 2, by, tied, str(Path(folder) / "state"))
    plain = llama(tied)
    for rank in range(2):
        for number in range(MICROBATCHES):
            ids = batch(rank, number)
            (plain(input_ids=ids, labels=ids).loss / (2 * MICROBATCHES)).backward()
    for torchs, ours in zip(found["torch"], found["ours"], strict=True):
        assert torchs.restored
        assert ours.restored
        assert ours.losses == torchs.losses
        assert ours.norms == pytest.approx(torchs.norms, rel=1e-12)
        assert worst(ours.first, gradients(plain)) < 1e-12
        assert ours.first.keys() == torchs.first.keys()
        assert ours.last.keys() == torchs.last.keys()
        assert all(torch.equal(p, torchs.last[name]) for name, p in ours.last.items())


def recipe_of(said: str) -> str:
    """Return the lines of code in an error's text."""
    return "\n".join(line.strip() for line in said.splitlines() if line.startswith("    "))


def saved(rank: int, folder: str, layout: Any) -> tuple[str, list[str], bool]:
    """Save without a state dict, then as the error says, and in another way."""
    model, mesh = llama(tied=True), mesh_of((2,), ("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh, layout=layout)
    fully_shard(model, mesh, layout=layout)
    model(input_ids=batch(rank, 0), labels=batch(rank, 0)).loss.backward()
    with pytest.raises(UnsupportedError) as caught:
        model.save_pretrained(str(Path(folder) / "none"))
    said = str(caught.value)
    exec(recipe_of(said), {"model": model, "path": str(Path(folder) / "recipe")})
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(str(Path(folder) / "given"), rank == 0, state)
    torch.distributed.barrier()
    made = [
        transformers.LlamaForCausalLM.from_pretrained(Path(folder) / name, dtype=torch.float64)
        for name in ("recipe", "given")
    ]
    same = [worst(parameters(each), parameters(llama(tied=True))) == 0 for each in made]
    return said, os.listdir(folder), all(same)


@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_save_pretrained_needs_a_state_dict_and_says_how(ranks: Ranks, layout: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for said, names, same in ranks(2).run(saved, folder, layout):
            assert "state_dict" in said
            assert sorted(names) == ["given", "recipe"]
            assert same


class Saved(torch.nn.Module):
    """A module of another library. Its ``save_pretrained`` takes no state dict."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x

    def save_pretrained(self, path: str) -> str:
        """Return the argument."""
        return path


def unrelated(rank: int) -> str:
    model: Any = fully_shard(Saved(), mesh_of((2,), ("fsdp",)))
    made: str = model.save_pretrained("there")
    return made


def test_a_method_of_that_name_without_a_state_dict_is_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(unrelated) == ["there", "there"]
