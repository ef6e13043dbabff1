"""Models of Hugging Face transformers: build, call and parallelize them."""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hp_cp import Layout
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import AxisMesh, Collectives
from hp_ep.transformers import parallelize_experts

from .config import TP_STYLES, ModelError, TransformersConfig
from .model import Forward, built_on_meta, normal


def build_transformers(
    config: TransformersConfig,
    seed: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    parts: int = 1,
    *,
    values: bool = True,
) -> nn.Module:
    """Return the model. Initial values depend only on the seed and each parameter's name.

    Parameters that the library initializes with one value, such as norms and biases, keep it. All
    others are normal with the deviation ``initializer_range`` of the configuration. The weight of
    the auxiliary loss is divided by ``parts``, the number of microbatches, each of which adds it.
    Without ``values``, parameters are on the meta device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    library: Any = AutoConfig.for_model(**config.fields)
    factory: Any = AutoModelForCausalLM
    # Other implementations use torch's grouped matmul, which does not support float64.
    eager = {"experts_implementation": "eager"} if dtype == torch.float64 else {}

    def build() -> Any:
        return factory.from_config(library, dtype=torch.float32, **eager)

    try:
        made = build().to(device, dtype) if values else built_on_meta(build, dtype, device)
    except Exception as error:
        raise ModelError(
            f"transformers makes no causal language model of this {config.fields['model_type']}: "
            f"{' '.join(str(error).split())[:300]}; correct its configuration, or use another model"
        ) from error
    if hasattr(made, "router_aux_loss_coef"):
        made.router_aux_loss_coef /= parts
    model: nn.Module = made.train()
    if not values:
        return model
    deviation = getattr(library.get_text_config(), "initializer_range", 0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.min() < parameter.max():
                parameter.copy_(normal(f"{seed}/{name}", parameter.shape) * deviation)
    return model


def forward_alone(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits ``[batch, seq, vocab]`` of unsharded sequences ``[batch, seq]``."""
    return _logits_of(model, model(input_ids=tokens, use_cache=False))


def shard_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Shard the matrices of layers over a mesh with torch's styles, following the library's plan.

    Activations between layers, the embedding and the head are replicated. Norms of single heads get
    the heads of their rank, so their gradients are summed over ranks.
    """
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    styles = dict(zip(TP_STYLES, (ColwiseParallel(), RowwiseParallel(), heads), strict=True))
    known = {name: styles[word] for name, word in plan.items()}
    parallelize_module(cast(Any, model).base_model, mesh, known, src_data_rank=None)


def distribute_experts(
    model: nn.Module, mesh: DeviceMesh, token_axes: AxisMesh, *, collectives: Collectives
) -> list[nn.Module]:
    """Distribute experts over a mesh; return the modules of experts.

    On one rank the library computes the experts, unless it has an auxiliary loss. That is computed
    from the tokens on all ranks of ``token_axes``.
    """
    if mesh.size() == 1 and not _is_balanced(model):
        return []
    names = parallelize_experts(model, mesh, token_axes=token_axes, collectives=collectives)
    return [model.get_submodule(name) for name in names]


def shard_attention(
    model: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    *,
    ulysses_degree: int,
    collectives: Collectives,
) -> Forward:
    """Enable context parallelism; return the function that calls the model with sharded tokens."""
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
        return _logits_of(model, found)

    return forward


def _is_balanced(model: nn.Module) -> bool:
    """Return whether the library computes an auxiliary loss of the experts' loads."""
    asked = getattr(cast(Any, model).config.get_text_config(), "output_router_logits", False)
    return bool(asked) and hasattr(model, "router_aux_loss_coef")


def _logits_of(model: Any, output: Any) -> Tensor:
    """Return a call's logits, whose backward adds the gradients of its auxiliary loss, if any."""
    if not (_is_balanced(model) and torch.is_grad_enabled()):
        return cast(Tensor, output.logits)
    share = model.router_aux_loss_coef * output.aux_loss
    return cast(Tensor, _AddGradients.apply(output.logits, share))  # type: ignore[no-untyped-call]


class _AddGradients(torch.autograd.Function):
    """Identity whose backward also runs the backward of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.one
