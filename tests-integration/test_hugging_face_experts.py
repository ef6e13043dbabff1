"""A Qwen3-MoE of Hugging Face: hp_ep spreads its experts, hp_fsdp shards them and all the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from hp_cp import InputError, Zigzag
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import clip_grad_norm_
from hp_ep.transformers import parallelize_experts
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims, ParallelMesh

transformers = pytest.importorskip("transformers")

STEPS = 10
MAX_NORM = 0.2


@contextmanager
def _exact() -> Iterator[None]:
    """Let losses of the library be float64, which it computes in float32."""
    zeros, narrow = torch.zeros, Tensor.float

    def wide(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else narrow(x)

    def wide_zeros(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
        return zeros(*size, dtype=torch.float64 if dtype is torch.float32 else dtype, **options)

    with patch.object(torch, "zeros", wide_zeros), patch.object(Tensor, "float", wide):
        yield


def _model() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.3,
        use_cache=False,
        experts_implementation="eager",
    )
    model = transformers.Qwen3MoeForCausalLM(config).double().train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model


def _batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (8, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)}


def _mesh(ep: int) -> ParallelMesh:
    return cached(
        ("experts", ep), lambda: ParallelDims(dp_shard=4, ep=ep).build_mesh(device_type="cpu")
    )


def _spread(ep: int) -> Any:
    model, mesh = _model(), _mesh(ep)
    parallelize_experts(model, mesh["ep"], token_axes=mesh["loss"])
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh["efsdp"], gradient_reduction="sum")
        fully_shard(layer, mesh["fsdp"], gradient_reduction="sum")
    return fully_shard(model, mesh["fsdp"], gradient_reduction="sum")


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _train(model: Any, rank: int, ranks: int) -> list[list[Tensor]]:
    """Return each step's loss, auxiliary loss and norm of gradients, and the first gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[list[Tensor]] = []
    for step in range(STEPS):
        with _exact():
            output = model(**{key: x.chunk(ranks)[rank] for key, x in _batch(step).items()})
            output.loss.backward()
        if not step:
            grads = [p.grad for p in model.parameters()]
            found.append([_whole(g) for g in grads if g is not None])
        losses = torch.stack([output.loss.detach(), output.aux_loss.detach()])
        if ranks > 1:
            torch.distributed.all_reduce(losses)
        found.append([losses, _whole(clip_grad_norm_(model.parameters(), MAX_NORM))])
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [_whole(p) for p in model.parameters()]]


def _on_rank(rank: int, ep: int) -> list[list[Tensor]]:
    return _train(_spread(ep), rank, 4)


def test_steps_of_adamw_are_those_of_one_process(ranks: Any) -> None:
    (gradients, *steps, weights) = _train(_model(), 0, 1)
    assert float(steps[0][1]) > MAX_NORM  # clipping changes something
    for found in ranks(4).run(_on_rank, 2):
        for grad, expected in zip(found[0], gradients, strict=True):
            assert float((grad - expected).norm() / expected.norm()) <= 1e-10
        for values, wanted in zip(found[1:-1], steps, strict=True):
            torch.testing.assert_close(values, wanted, rtol=1e-7, atol=0)
        for weight, expected in zip(found[-1], weights, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def _with_cut_sequences(rank: int) -> list[Tensor]:
    """Return loss, auxiliary loss and gradients where ranks hold parts of the same sequences."""
    mesh = cached("cut", lambda: ParallelDims(cp=2, ep=2).build_mesh(device_type="cpu"))
    model = _model()
    parallelize_experts(model, mesh["ep"], token_axes=mesh["loss"])
    context_parallel(model, mesh["cp"], layout=Zigzag())
    with _exact():
        output = model(**shard_batch(_batch(0), mesh["cp"], Zigzag()))
        output.loss.backward()
    found = [output.loss.detach(), output.aux_loss.detach()]
    for p in model.parameters():
        found.append(_whole(p.grad))
        if not isinstance(p.grad, DTensor):
            torch.distributed.all_reduce(found[-1])
    for share in found[:2]:
        torch.distributed.all_reduce(share)
    return found


def _in_the_other_order(rank: int) -> str:
    mesh = cached("cut", lambda: ParallelDims(cp=2, ep=2).build_mesh(device_type="cpu"))
    model = context_parallel(_model(), mesh["cp"], layout=Zigzag())
    parallelize_experts(model, mesh["ep"], token_axes=mesh["loss"])
    with pytest.raises(InputError) as error:
        model(**shard_batch(_batch(0), mesh["cp"], Zigzag()))
    return str(error.value)


def test_an_auxiliary_loss_wants_experts_spread_before_sequences_are_cut(ranks: Any) -> None:
    for said in ranks(2).run(_in_the_other_order):
        assert "call parallelize_experts of hp-ep, with token_axes, before context_parallel" in said


def test_losses_and_gradients_are_those_of_one_process_where_sequences_are_cut_too(
    ranks: Any,
) -> None:
    model = _model()
    with _exact():
        output = model(**_batch(0))
        output.loss.backward()
    expected = [
        output.loss.detach(),
        output.aux_loss.detach(),
        *(p.grad for p in model.parameters()),
    ]
    for found in ranks(2).run(_with_cut_sequences):
        for value, each in zip(found, expected, strict=True):
            assert float((value - each).norm() / each.norm()) <= 1e-10


def _save(rank: int, folder: Path) -> None:
    model = _spread(4)
    save(get_model_state_dict(model), checkpoint_id=folder)


def _load(rank: int, folder: Path) -> dict[str, Any]:
    model = _spread(2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = get_model_state_dict(model)
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def test_a_checkpoint_loads_under_another_split_and_in_one_process(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(4).run(_save, tmp_path)
    expected, model = _model().state_dict(), _model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    plain = model.state_dict()
    with pytest.warns(UserWarning, match="load in a single process"):
        load(plain, checkpoint_id=tmp_path)
    for state in (plain, *ranks(4).run(_load, tmp_path)):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
