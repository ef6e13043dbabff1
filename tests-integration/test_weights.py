"""Weights from published files to any degrees and back, for layers of all packages together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_cp import unshard_sequence
from hp_cp.transformers import context_parallel, shard_batch
from hp_ep import ExpertParallel, MoE, Placement, expert_sources
from hp_ep import parallelize_experts as parallelize_layers
from hp_ep.transformers import checkpoint_sources, parallelize_experts
from hp_fsdp import (
    CheckpointError,
    fully_shard,
    load_safetensors,
    parameters_on_meta,
    save_safetensors,
)

transformers = pytest.importorskip("transformers")

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": {**SIZES, **EXPERTS},
    "llama": SIZES,
    "llama, tied": {**SIZES, "tie_word_embeddings": True},
}
TP_PLAN: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def config_of(name: str) -> Any:
    kind = name.partition(",")[0]
    return transformers.AutoConfig.for_model(kind, **CONFIGS[name], dtype="float64")


def published(folder: Path, name: str) -> Path:
    """Write a model in the format of `save_pretrained`, in several files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).double()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len([*folder.glob("*.safetensors")]) > 1
    return folder


def batch() -> Tensor:
    return torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))


def logits_of(folder: str | Path) -> Tensor:
    """Return the logits of the model that one process loads with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the default one computes in float32 at most
    with torch.no_grad():
        return model(batch()).logits  # type: ignore[no-any-return]


def mesh_of(**axes: int) -> DeviceMesh:
    key = tuple(axes.items())
    return cached(
        key,
        lambda: init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)),
    )


def parallel(name: str, how: str) -> tuple[Any, Any]:
    """Return a parallel model without values, and its mesh of context parallelism."""
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config_of(name)).double()
    cp = None
    layout: Any = "ragged" if "ragged" in how else "exact"
    if how == "ep x cp":
        mesh = mesh_of(ep=2, cp=2)
        parallelize_experts(model, mesh["ep"])
        cp, dense, experts = mesh["cp"], mesh_of(fsdp=4), mesh["cp"]
    elif how.startswith("ep"):
        mesh = mesh_of(efsdp=2, ep=2)
        parallelize_experts(model, mesh["ep"])
        dense, experts = mesh_of(fsdp=4), mesh["efsdp"]
    elif how == "tp":
        mesh = mesh_of(fsdp=2, tp=2)
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], TP_PLAN, src_data_rank=None)
        dense = mesh["fsdp"]
    else:
        dense = mesh_of(fsdp=4)
    for layer in model.model.layers:
        if how.startswith("ep"):
            fully_shard(layer.mlp.experts, experts)
        fully_shard(layer, dense, layout=layout if how != "ep, ragged" else "exact")
    fully_shard(model, dense, layout=layout)
    return model, cp


def round_trip(rank: int, name: str, how: str, source: str, target: str) -> Tensor:
    model, cp = parallel(name, how)
    load_safetensors(model, source, sources=checkpoint_sources(model))
    save_safetensors(model, target, sources=checkpoint_sources(model), max_file_bytes=50_000)
    if rank == 0:
        model.config.save_pretrained(target)
    if cp is not None:
        context_parallel(model, cp)
        with torch.no_grad():
            logits = model(**shard_batch({"input_ids": batch()}, cp)).logits
            result: Tensor = unshard_sequence(logits, cp, None, seq_dim=1)
            return result
    with torch.no_grad():
        return model(batch()).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("qwen3_moe", "ep"),
        ("qwen3_moe", "ep, ragged"),
        ("qwen3_moe", "ep x cp"),
        ("llama", "tp"),
        ("llama", "ragged"),
        ("llama, tied", "exact"),
        ("llama, tied", "tp"),
    ],
)
def test_from_published_files_and_back(ranks: Any, tmp_path: Path, name: str, how: str) -> None:
    source, target = published(tmp_path / "source", name), tmp_path / "target"
    expected = logits_of(source)
    found = ranks(4).run(round_trip, name, how, str(source), str(target))
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(logits_of(target), expected)
    names = [path.name for path in target.glob("*.safetensors")]
    assert len(names) > 1


# Experts under a placement.


def net(experts: tuple[int, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MoE(8, 12, num_experts=4, top_k=2).double()
    mesh = mesh_of(efsdp=2, ep=2)
    placement = Placement(num_ranks=2, num_experts=4, experts=experts)
    parallelize_layers(model, mesh["ep"], ExpertParallel(token_axes=mesh, placement=placement))
    fully_shard(model.experts, mesh["efsdp"])
    fully_shard(model, mesh_of(fsdp=4))
    return model


def placed(rank: int, folder: str) -> tuple[bool, list[str]]:
    """Save experts in one order, and load them into another one with replicas."""
    model, x = net((3, 1, 2, 0), 0), torch.randn(5, 8, dtype=torch.float64)
    save_safetensors(model, folder, sources=expert_sources(model))
    other = net((0, 2, 3, 1, 3, 2), 1)
    load_safetensors(other, folder, sources=expert_sources(other))
    with torch.no_grad():
        equal = torch.allclose(other(x), model(x), rtol=1e-13)
    messages = []
    for call in (load_safetensors, save_safetensors):
        with pytest.raises(CheckpointError) as caught:
            call(model, folder if call is load_safetensors else folder + "-other")
        messages.append(str(caught.value))
    return equal, messages


def test_experts_under_a_placement(ranks: Any, tmp_path: Path) -> None:
    for equal, messages in ranks(4).run(placed, str(tmp_path)):
        assert equal
        for message in messages:
            assert "experts.gate_up_proj" in message
            assert "expert_sources" in message
