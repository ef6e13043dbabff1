"""Small models of Hugging Face transformers in float64, alike in every process, and their steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCAB = 50
BOUND = 1e-10
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        **BALANCED,
    },
    "Mixtral": {"num_local_experts": 4, **BALANCED},
    "DeepseekV3": {
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "GptOss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "swiglu_limit": 0.5,  # many are clamped
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        **BALANCED,
    },
    "DeepseekV4": {
        "head_dim": 8,
        "q_lora_rank": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
    },
    "Ernie4_5_Moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
    "Afmoe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_dense_layers": 0,
        "head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
    },
    "Olmoe": {"num_experts": 4, "norm_topk_prob": False, **BALANCED},
    "Qwen2Moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        **BALANCED,
    },
}


@contextmanager
def exact() -> Iterator[None]:
    """Let the library's models compute in float64 what they cast to float32, or make of it."""
    softmax, zeros = F.softmax, torch.zeros
    float32, cast, to = Tensor.float, Tensor.type, Tensor.to

    def wide(dtype: Any) -> Any:
        return torch.float64 if dtype is torch.float32 else dtype

    def kept_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    def kept(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else float32(x)

    def kept_type(x: Tensor, *dtype: Any) -> Any:
        return x if (x.dtype, *dtype) == (torch.float64, torch.float32) else cast(x, *dtype)

    def kept_to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.dtype == torch.float64:
            args = tuple(map(wide, args))
            options = {key: wide(value) for key, value in options.items()}
        return to(x, *args, **options)

    def wide_zeros(*size: Any, dtype: Any = None, **options: Any) -> Tensor:
        return zeros(*size, dtype=wide(dtype), **options)

    with (
        patch.object(F, "softmax", kept_softmax),
        patch.object(torch, "zeros", wide_zeros),
        patch.object(Tensor, "float", kept),
        patch.object(Tensor, "type", kept_type),
        patch.object(Tensor, "to", kept_to),
    ):
        yield


def model_of(name: str, **options: Any) -> Any:
    """Return a small model, the same in every process, that computes its experts one by one."""
    import transformers

    config_type = getattr(transformers, f"{name}Config")
    settings = {
        **SIZES,
        **MODELS[name],
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "use_cache": False,
        **options,
    }
    model = getattr(transformers, f"{name}ForCausalLM")(config_type(**settings)).double().train()
    generator = torch.Generator().manual_seed(0)
    for each in (*model.parameters(), *correction_biases(model)):  # zeros, some of them
        with torch.no_grad():
            each.copy_(0.2 * torch.randn(each.shape, generator=generator, dtype=torch.float64))
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # zeros: every fourth token still chooses expert 0 twice
            table[:, 1] = torch.arange(VOCAB) % 4
    return model


def correction_biases(model: nn.Module) -> list[Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    """Return sequences, of whose labels each row leaves out others."""
    ids = torch.randint(3, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(1))
    ends = torch.arange(rows)[:, None] * 2 + 3
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(11) < ends, -100)}


def padded(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with padding at the end of rows, other lengths in each."""
    ids = batch["input_ids"]
    ends = 10 - torch.arange(ids.shape[0])[:, None]
    mask = (torch.arange(ids.shape[1]) < ends).double()
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "labels": batch["labels"].masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def rows_of(batch: Mapping[str, Tensor], sizes: list[int], rank: int) -> dict[str, Tensor]:
    """Return a rank's rows, ``sizes`` of which go to each."""
    return {key: value.split(sizes)[rank] for key, value in batch.items()}


def step(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the losses and all gradients, those of DTensors whole."""
    output = model(**batch)
    output.loss.backward()
    found = {"loss": output.loss.detach()}
    if output.get("aux_loss") is not None:
        found["aux_loss"] = output.aux_loss.detach()
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def error_of(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative error of the losses and of any gradient."""
    assert list(found) == list(expected)
    errors = []
    for name, value in expected.items():
        assert found[name].shape == value.shape
        errors.append((found[name] - value).norm() / value.norm())
    return float(torch.stack(errors).max())
