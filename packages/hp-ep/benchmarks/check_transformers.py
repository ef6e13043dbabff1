"""Compare the mixture-of-experts models of transformers on two ranks with one process, in float64.

``python benchmarks/check_transformers.py [CLASS ...]`` takes every class ``*ForCausalLM`` of the
installed library whose experts are called through its registry. Models have random weights and a
small config: sizes that a config has are replaced by small ones. Prints the largest relative error
of the loss and of any gradient, or why a model was not compared.
"""

import argparse
import importlib
import inspect
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hp_ep import AllToAll
from hp_ep.transformers import parallelize_experts

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hf_models import BOUND, VOCAB, batch_of, exact, rows_of

SPLITS = [3, 1]  # sequences of each rank
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 20,
    "shared_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 20,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "hc_mult": 2,
    "sliding_window": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "use_mamba_kernels": False,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "use_cache": False,
}
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"layer_types": None, "mlp_layer_types": None},
    {"layer_types": None, "mlp_layer_types": None, "num_key_value_heads": 4},
    {"head_dim": None, "num_key_value_heads": 4},
    {"num_experts_per_tok": 1, "num_key_value_heads": 4},
    {"num_experts_per_tok": 1, "layer_types": None, "mlp_layer_types": None},
)
"""What to try in turn where a config takes no model of these sizes; None leaves the default."""
NOISY = ("PhimoeForCausalLM",)
"""Routers that draw noise in training: compared in evaluation mode."""


def classes() -> dict[str, type]:
    """Return the library's classes of language models with experts in its registry, by name."""
    models, found = importlib.import_module("transformers.models"), {}
    for package in pkgutil.iter_modules(models.__path__):
        folder = Path(models.__path__[0]) / package.name
        for file in folder.glob("modeling_*.py"):
            if "use_experts_implementation" in file.read_text():
                module = importlib.import_module(f"{models.__name__}.{package.name}.{file.stem}")
                for name, each in inspect.getmembers(module, inspect.isclass):
                    if name.endswith("ForCausalLM") and each.__module__ == module.__name__:
                        found[name] = each
    return found


def model_of(kind: Any, settings: dict[str, Any]) -> Any:
    """Return a small model of a class, the same in every process."""
    config = kind.config_class
    known = set(inspect.signature(config.__init__).parameters) | set(dir(config()))
    known |= {"attn_implementation", "experts_implementation"}
    model = kind(config(**{key: value for key, value in settings.items() if key in known}))
    model = model.double().train(kind.__name__ not in NOISY)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(0.2 * torch.randn(each.shape, generator=generator, dtype=torch.float64))
    return model


def reference(kind: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings of a model that runs in one process, and its losses and gradients."""
    for i, other in enumerate(OTHERS):
        settings = {key: value for key, value in {**SMALL, **other}.items() if value is not None}
        try:
            return settings, step(model_of(kind, settings), batch_of())
        except Exception:  # of any library: other settings may do
            if i == len(OTHERS) - 1:
                raise
    raise ValueError("no settings to try")


def step(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss and the gradients, those of DTensors whole."""
    loss = model(**batch).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def error_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error, of small tensors to a millionth of the largest."""
    if found.keys() != expected.keys():
        raise ValueError(f"other parameters have gradients: {found.keys() ^ expected.keys()}")
    least = 1e-6 * max(float(value.norm()) for value in expected.values())
    return max(
        float((found[name] - value).norm()) / max(float(value.norm()), least)
        for name, value in expected.items()
    )


def compare(rank: int, kind: Any) -> float:
    """Return the error of one model."""
    with exact():
        settings, expected = reference(kind)
        model = model_of(kind, settings)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        dispatcher: Any = "auto"
        if not hasattr(model.config, "num_experts_per_tok"):
            dispatcher = AllToAll(mesh, 8)
        names = parallelize_experts(model, mesh, dispatcher, token_axes=mesh)
        found = step(model, rows_of(batch_of(), SPLITS, rank))
    for name, value in found.items():
        if not any(name.startswith(f"{each}.") for each in names):
            dist.all_reduce(value)
    return error_of(found, expected)


def main(rank: int, names: list[str], store: str) -> None:
    """Compare every model on one of two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    equal = 0
    for name, kind in classes().items():
        if names and name not in names:
            continue
        try:
            error = compare(rank, kind)
            text = f"{error:.0e}" if error <= BOUND else f"NOT EQUAL: {error:.0e}"
            equal += error <= BOUND
        except Exception as found:  # noqa: BLE001  # the next model is compared all the same
            text = f"{type(found).__name__}: {found}".replace("\n", " ")[:160]
        if rank == 0:
            print(f"{name:36} {text}", flush=True)
    if rank == 0:
        print(f"{equal} models equal one process within {BOUND:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CLASS", help="compare these alone")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (parser.parse_args().names, f"{folder}/store"), nprocs=2)
