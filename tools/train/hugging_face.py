"""Models of Hugging Face transformers, built, called and spread as the built-in one is."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp import Layout
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import Collectives

from .config import TransformersConfig
from .model import Forward, normal


def build_transformers(
    config: TransformersConfig,
    seed: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Return the model with initial values that depend on ``seed`` and each parameter's name only.

    What the library starts with one value, as norms and biases, keeps it; the rest is normal with
    the deviation ``initializer_range`` of the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoConfig.for_model(**config.fields)
    factory: Any = AutoModelForCausalLM
    model: nn.Module = factory.from_config(library, dtype=torch.float32)
    model = model.to(device, dtype).train()
    deviation = getattr(library.get_text_config(), "initializer_range", 0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.min() < parameter.max():
                parameter.copy_(normal(f"{seed}/{name}", parameter.shape) * deviation)
    return model


def forward_alone(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits ``[batch, seq, vocab]`` of whole sequences ``[batch, seq]``."""
    return cast(Tensor, model(input_ids=tokens, use_cache=False).logits)


def spread_attention(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    *,
    ulysses_degree: int,
    collectives: Collectives,
) -> Forward:
    """Let the attention span the ranks of ``mesh``; return how to call the model on their parts."""
    context_parallel(
        model, mesh, layout=layout, ulysses_degree=ulysses_degree, collectives=collectives
    )

    @cache
    def shard_of(seq_len: int) -> Any:
        whole = torch.zeros(1, seq_len, dtype=torch.int64)
        return shard_batch({"input_ids": whole}, mesh, layout)["sequence_shard"]

    def forward(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        found = model(
            input_ids=tokens,
            position_ids=positions[None],
            use_cache=False,
            sequence_shard=shard_of(tokens.shape[1] * mesh.size()),
        )
        return cast(Tensor, found.logits)

    return forward
