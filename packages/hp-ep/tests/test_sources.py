"""`checkpoint_sources` finds every parameter in the files that transformers writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_dtensor.sources import Reorder, SourcePlan, Stored
from hp_ep import ExpertConfigError, ExpertParallel, MoE, Placement, expert_sources
from hp_ep import parallelize_experts as parallelize_layers
from hp_ep.transformers import checkpoint_sources, parallelize_experts

from .hf_models import MODELS, model_of

transformers = pytest.importorskip("transformers")


def saved(model: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Save a model with transformers in several files, and return the tensors of all files."""
    model.save_pretrained(folder, max_shard_size="40KB", **options)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def assembled(plan: SourcePlan, tensors: dict[str, Tensor], like: Tensor, name: str) -> Tensor:
    """Return a parameter, made of the stored tensors piece by piece."""
    result = torch.full_like(like, -1)
    box = tuple((0, length) for length in like.shape)
    for piece in plan.parameters[name].pieces(box, plan.stored):
        stored = tensors[piece.name][tuple(slice(*interval) for interval in piece.stored)]
        result[tuple(slice(*interval) for interval in piece.target)] = piece.as_target(stored)
    return result


def differing(model: Any, plan: SourcePlan, tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters that the plan does not make, tied ones counted once."""
    found = []
    for name, value in model.state_dict().items():
        if name in plan.parameters:
            if not torch.equal(assembled(plan, tensors, value, name), value):
                found.append(name)
        elif name not in model.all_tied_weights_keys:
            found.append(name)
    return found


@pytest.mark.parametrize("original", [True, False], ids=["published", "as in the model"])
@pytest.mark.parametrize("name", MODELS)
def test_files_of_transformers(tmp_path: Path, name: str, original: bool) -> None:
    model = model_of(name)
    tensors = saved(model, tmp_path, save_original_format=original)
    plan = checkpoint_sources(model)(shapes_of(tensors))
    assert differing(model, plan, tensors) == []
    assert plan.ignored == frozenset()


@pytest.mark.parametrize("name", MODELS)
def test_names_to_save_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    expected = saved(model, tmp_path)
    plan = checkpoint_sources(model)(None)
    assert dict(plan.stored) == shapes_of(expected)
    assert differing(model, plan, expected) == []


@pytest.mark.parametrize("tied", [False, True])
def test_files_of_a_base_model(tmp_path: Path, tied: bool) -> None:
    """The base model has no prefix and no head."""
    model = model_of("Qwen3Moe", tie_word_embeddings=tied)
    tensors = saved(model.model, tmp_path)
    plan = checkpoint_sources(model)(shapes_of(tensors))
    assert "model.layers.0.mlp.experts.gate_up_proj" in plan.parameters
    assert differing(model, plan, tensors) == ([] if tied else ["lm_head.weight"])


def split(rank: int, folder: str) -> list[str]:
    """Find the parameters of a model after its experts are split and its layers are sharded."""
    model = model_of("Qwen3Moe")
    tensors = {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}
    expected = model_of("Qwen3Moe")
    mesh = cached("sources", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    parallelize_experts(model, mesh, token_axes=mesh)
    for layer in (*model.model.layers, model):
        experts = {p for n, p in layer.named_parameters() if ".experts." in f".{n}"}
        fully_shard(layer, mesh=mesh, ignored_params=experts)  # changes the classes' names
    return differing(expected, checkpoint_sources(model)(shapes_of(tensors)), tensors)


def test_a_sharded_model_has_the_same_sources(ranks: Any, tmp_path: Path) -> None:
    saved(model_of("Qwen3Moe"), tmp_path)
    assert ranks(2).run(split, str(tmp_path)) == [[], []]


def test_names_that_transformers_ignores(tmp_path: Path) -> None:
    model = model_of("DeepseekV3")
    tensors = saved(model, tmp_path)
    extra = ["model.layers.61.embed_tokens.weight", "model.layers.0.rotary_emb.inv_freq"]
    shapes = shapes_of(tensors) | dict.fromkeys([*extra, "model.other"], (3,))
    plan = checkpoint_sources(model)(shapes)
    assert plan.ignored == frozenset(extra)


@pytest.fixture
def other_conversion() -> Iterator[None]:
    """Register a conversion that is no slice of the stored tensors."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    mapping: Any = conversion_mapping
    before = mapping.get_checkpoint_conversion_mapping("qwen3_moe")
    converter = WeightConverter(
        "self_attn.o_proj.weight", "self_attn.o_proj.weight", [Interleave()]
    )
    mapping.register_checkpoint_conversion_mapping(
        "qwen3_moe", [*before, converter], overwrite=True
    )
    yield
    mapping.register_checkpoint_conversion_mapping("qwen3_moe", before, overwrite=True)


def test_a_conversion_that_is_no_slice_is_refused(other_conversion: None, tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    shapes = shapes_of(saved(model, tmp_path))
    with pytest.raises(ExpertConfigError) as caught:
        checkpoint_sources(model)(shapes)
    for layer in range(2):
        assert f"model.layers.{layer}.self_attn.o_proj.weight (made of" in str(caught.value)
    assert "reshape" in str(caught.value)
    assert "save_original_format=False" in str(caught.value)


def test_other_models_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match="must be a PreTrainedModel"):
        checkpoint_sources(nn.Linear(2, 2))
    model = model_of("Qwen3Moe")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ExpertConfigError, match="quantization_config"):
        checkpoint_sources(model)


def placed(rank: int, experts: tuple[int, ...]) -> SourcePlan:
    mesh = cached("placed", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    placement = Placement(num_ranks=2, num_experts=4, experts=experts)
    model = nn.ModuleDict(
        {
            "placed": MoE(8, 12, num_experts=4, top_k=2),
            "plain": MoE(8, 12, num_experts=4, top_k=2),
        }
    )
    parallelize_layers(model["placed"], mesh, ExpertParallel(token_axes=mesh, placement=placement))
    parallelize_layers(model["plain"], mesh, ExpertParallel(token_axes=mesh))
    return expert_sources(model)(None)


@pytest.mark.parametrize("experts", [(3, 1, 2, 0), (3, 1, 2, 0, 1, 3)])
def test_experts_of_a_placement(ranks: Any, experts: tuple[int, ...]) -> None:
    for plan in ranks(2).run(placed, experts):
        assert plan.parameters == {
            name: Reorder(Stored(name), experts)
            for name in ("placed.experts.gate_up_proj", "placed.experts.down_proj")
        }
        assert dict(plan.stored) == {
            "placed.experts.gate_up_proj": (4, 2, 12, 8),
            "placed.experts.down_proj": (4, 8, 12),
        }
