"""Adapters of peft on the weights of experts that are spread over ranks."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_pool import cached, fails_with_torch_2_11
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hp_ep import (
    ExpertConfigError,
    ExpertParallel,
    ExpertTensorParallel,
    MoE,
    TensorParallel,
)
from hp_ep import parallelize_experts as parallelize_layers
from hp_ep.transformers import parallelize_experts

from .hf_models import BOUND, batch_of, error_of, exact, model_of, rows_of

peft = pytest.importorskip("peft")
# peft reads a property of the library's models that is to go.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

SPLITS = [3, 1]  # sequences of each rank
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def exact_models() -> Iterator[None]:
    with exact():
        yield


def _mesh(*shape: int) -> DeviceMesh:
    names = ("ep", "etp")[: len(shape)]
    return cached(shape, lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _adapted(model: nn.Module, parameters: list[str], **options: Any) -> Any:
    """Return the model of peft, the same in every process."""
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_parameters=parameters, **options)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                shape = parameter.shape
                parameter.copy_(0.2 * torch.randn(shape, generator=generator, dtype=torch.float64))
    return adapted


def _step(adapted: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss and the gradients of two steps, whole; those of plain tensors are sums."""
    found = {}
    for _ in range(2):
        loss = adapted(**batch).loss
        loss.backward()
        found["loss"] = loss.detach()
    for name, parameter in adapted.named_parameters():
        if isinstance(parameter.grad, DTensor):
            assert parameter.grad.placements == (Replicate(),)
            found[name] = parameter.grad.full_tensor()
        elif parameter.requires_grad:
            found[name] = parameter.grad
    return found


def _trained(rank: int, name: str, folder: Path) -> dict[str, Tensor]:
    adapted = _adapted(model_of(name), EXPERTS, target_modules=["q_proj"])
    with exact():
        parallelize_experts(adapted.get_base_model(), _mesh(2), token_axes=_mesh(2))
        found = _step(adapted, rows_of(batch_of(), SPLITS, rank))
    for key, value in found.items():
        if "experts" not in key:
            torch.distributed.all_reduce(value)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(adapted, options=whole)
    if rank == 0:
        adapted.save_pretrained(folder, state_dict=state)
    return found


@fails_with_torch_2_11("DTensors cannot flatten a dimension that is sharded, as peft does")
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_adapters_of_experts_train_as_in_one_process(ranks: Any, name: str, tmp_path: Path) -> None:
    single = _adapted(model_of(name), EXPERTS, target_modules=["q_proj"])
    expected = _step(single, batch_of())
    assert sum("experts" in key for key in expected) == 2 * 2 * 2  # layers, weights, A and B
    for found in ranks(2).run(_trained, name, tmp_path):
        assert error_of(found, expected) <= BOUND
    read = peft.PeftModel.from_pretrained(model_of(name), tmp_path).state_dict()
    written = {key: value for key, value in single.state_dict().items() if "lora_" in key}
    assert all(torch.equal(read[key], value) for key, value in written.items())


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(4, 6, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(x)
        return y


def _text(call: Any) -> str:
    with pytest.raises(ExpertConfigError) as error:
        call()
    return str(error.value)


def _refused(rank: int) -> list[str]:
    """Return what is said of adapters that are added too late, or to layers of this package."""
    spread, part = model_of("Qwen3Moe"), rows_of(batch_of(), SPLITS, rank)
    parallelize_experts(spread, _mesh(2), token_axes=_mesh(2))
    late = _adapted(spread, EXPERTS)
    second = _adapted(model_of("Qwen3Moe"), EXPERTS)
    parallelize_experts(second.get_base_model(), _mesh(2), token_axes=_mesh(2))
    second.add_adapter("later", peft.LoraConfig(r=1, target_parameters=EXPERTS))
    found = [_text(lambda: late(**part)), _text(lambda: second(**part))]
    styles: dict[Any, tuple[int, ...]] = {
        ExpertParallel(): (2,),
        TensorParallel(): (2,),
        ExpertTensorParallel(): (1, 2),
    }
    for style, shape in styles.items():
        early, after = _adapted(_Layers(), ["experts.down_proj"]), _Layers()
        found.append(_text(lambda e=early, s=style, n=shape: parallelize_layers(e, _mesh(*n), s)))
        parallelize_layers(after, _mesh(*shape), style)
        adapted = _adapted(after, ["experts.down_proj"])
        found.append(_text(lambda a=adapted: a(torch.ones(2, 4))))
    return found


def test_adapters_that_no_rank_can_compute_are_refused_by_all(ranks: Any) -> None:
    first, second = ranks(2).run(_refused)
    assert first == second
    for text in first[:2]:
        assert "was added to the experts of this Qwen3MoeForCausalLM after" in text
        assert "parallelize_experts(peft_model.get_base_model()" in text
    for text in first[2:]:
        assert "the experts are inside a ParamWrapper" in text
        assert "use target_modules in place of target_parameters" in text


class _Around(nn.Module):
    """Calls what is in it, as modules that recompute or compile do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        y: Tensor = self.inner(*args)
        return y


def _wrapped(rank: int) -> tuple[Tensor, Tensor]:
    """Return what layers compute before and after their experts are wrapped."""
    layer = MoE(4, 6, 4, 2)
    parallelize_layers(layer, _mesh(2), ExpertParallel())
    before = layer(torch.ones(2, 4))
    layer.experts = cast(Any, _Around(layer.experts))
    return before.detach(), layer(torch.ones(2, 4)).detach()


def test_experts_in_a_wrapper_without_parameters_compute(ranks: Any) -> None:
    for before, after in ranks(2).run(_wrapped):
        assert torch.equal(before, after)
