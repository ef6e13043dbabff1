"""Loads of the experts of transformers models, and the biases of their routers that follow them."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_ep import ExpertConfigError, collect_loads, update_router_bias
from hp_ep.transformers import parallelize_experts

from .hf_models import BOUND, batch_of, exact, model_of, rows_of

pytest.importorskip("transformers")

SPLITS = [3, 1]  # sequences of each rank
RATE = 0.05
BIASES = {
    "DeepseekV3": "mlp.gate.e_score_correction_bias",
    "Ernie4_5_Moe": "mlp.gate.moe_statics.e_score_correction_bias",
    "Afmoe": "mlp.expert_bias",
}
"""Where a layer has its bias: a buffer of the router, a parameter below it, one beside it."""


@pytest.fixture(autouse=True)
def exact_models() -> Iterator[None]:
    with exact():
        yield


def _mesh() -> DeviceMesh:
    return cached("ep mesh", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))


def _bias(model: Any, name: str) -> Tensor:
    module, _, bias = BIASES[name].rpartition(".")
    found: Tensor = getattr(model.model.layers[1].get_submodule(module), bias)
    return found


def _spread(name: str, **options: Any) -> Any:
    model = model_of(name)
    parallelize_experts(model, _mesh(), token_axes=_mesh(), bias_rate=RATE, **options)
    return model


def _updated(rank: int, name: str) -> list[Any]:
    """Update the biases after a forward alone, a step, its repetition in a copy and no step."""
    model, part = _spread(name), rows_of(batch_of(), SPLITS, rank)
    model.activation_checkpointing_enable({"use_reentrant": False})
    with exact():
        model(**part)
        nothing = list(collect_loads(model).values())[-1]
        model(**part).loss.backward()
        other = copy.deepcopy(model)
        loads = list(update_router_bias(model).items())
        moved = _bias(model, name).clone()
        update_router_bias(other)
        update_router_bias(model)
        losses = model(**part).loss.detach()
    torch.distributed.all_reduce(losses)
    same = torch.equal(_bias(other, name), moved) and torch.equal(_bias(model, name), moved)
    return [nothing, *loads[-1], moved.flatten(), same, losses]


def _single(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last layer's load in one process, its bias after an update, the loss of then."""
    model, found = model_of(name), []

    def note(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append(args[1])

    experts = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for each in experts:
        each.register_forward_pre_hook(note)
    model(**batch_of())
    loads = [torch.bincount(ids.flatten(), minlength=experts[0].num_experts) for ids in found]
    biases = [tensor for key, tensor in model.state_dict().items() if BIASES[name] in key]
    for load, bias in zip(loads, biases, strict=True):
        bias += RATE * (load.double().mean() - load).sign()
    return loads[-1], biases[-1].flatten(), model(**batch_of()).loss


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_the_library_follow_the_loads_of_all_ranks(ranks: Any, name: str) -> None:
    load, bias, loss = _single(name)
    assert load.float().std() > 0
    for nothing, where, counted, moved, same, losses in ranks(2).run(_updated, name):
        assert nothing.tolist() == [0] * len(load)
        assert where == "model.layers.1.mlp.experts"
        assert torch.equal(counted, load)
        torch.testing.assert_close(moved, bias, rtol=0, atol=BOUND)
        assert same
        assert losses.item() == pytest.approx(loss.item(), rel=BOUND)


def _text(call: Any) -> str:
    with pytest.raises(ExpertConfigError) as error:
        call()
    return str(error.value)


def _refused(rank: int) -> list[str]:
    mesh, narrow = _mesh(), _spread("DeepseekV3").bfloat16()
    untold, still = model_of("DeepseekV3"), model_of("DeepseekV3")
    parallelize_experts(untold, mesh, bias_rate=RATE)
    parallelize_experts(still, mesh, token_axes=mesh)
    assert [load.tolist() for load in collect_loads(still).values()] == [[0] * 8]
    spread = partial(parallelize_experts, mesh=mesh, token_axes=mesh)
    return [
        _text(lambda: spread(model_of("Mixtral"), bias_rate=RATE)),
        _text(lambda: spread(model_of("DeepseekV3"), bias_rate=-1.0)),
        _text(lambda: update_router_bias(narrow)),
        _text(lambda: update_router_bias(untold)),
        _text(lambda: update_router_bias(still)),
    ]


def test_biases_that_cannot_follow_are_refused(ranks: Any) -> None:
    first, second = ranks(2).run(_refused)
    assert first == second
    missing, negative, narrow, untold, still = first
    assert missing.startswith("bias_rate=0.05, but no router of this MixtralForCausalLM has a bias")
    assert negative.startswith("bias_rate=-1.0 must be a finite number of at least 0")
    assert narrow.startswith("the bias of model.layers.1.mlp.experts is a plain torch.bfloat16")
    assert "were not told which axes split their tokens" in untold
    assert "have bias_rate=0" in still
