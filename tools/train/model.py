"""A decoder-only mixture-of-experts language model without parallelism.

It has the parts of LLaMA (arXiv 2302.13971, section 2.2): RMSNorm (arXiv 1910.07467), rotary
positions (arXiv 2104.09864) and SwiGLU (arXiv 2002.05202), with grouped-query attention
(arXiv 2305.13245).
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_ep import MoE
from hp_fsdp import parameters_on_meta

from .config import ModelConfig

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Takes a model, tokens and positions ``[seq]``; returns logits ``[batch, seq, vocab]``."""


class CoreAttention(nn.Module):
    """Scaled dot product attention as a module, which a parallel style can replace."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        """Return attention of ``[batch, heads, seq, head_dim]``."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=enable_gqa
        )


class Attention(nn.Module):
    """Causal grouped-query attention. The number of heads follows from the projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.wq = nn.Linear(config.hidden_size, width, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.wo = nn.Linear(width, config.hidden_size, bias=False)
        self.core = CoreAttention()

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Return ``[batch, seq, hidden]`` for the same shape, at ``position_ids`` ``[seq]``."""
        query, key, value = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        query, key = (rotate(t, position_ids, self.rope_theta) for t in (query, key))
        out: Tensor = self.core(query, key, value, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Rotate ``x`` ``[batch, heads, seq, head_dim]`` by rotary positions ``[seq]``.

    The two halves of a head hold the two coordinates of each plane (arXiv 2104.09864, section 3.4).
    """
    half = x.shape[-1] // 2
    precise = torch.promote_types(x.dtype, torch.float32)  # bfloat16 cannot represent all positions
    exponents = torch.arange(half, dtype=precise, device=x.device) / half
    angles = position_ids.to(precise)[:, None] * theta**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    """The SwiGLU network of a block without experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``w2(silu(w1 x) * w3 x)``, of the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a feed-forward network or a mixture of experts, each with a residual."""

    def __init__(self, config: ModelConfig, *, experts: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: nn.Module = (
            MoE(
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                load_balance_loss=config.router_aux_loss_coef,
            )
            if experts
            else FeedForward(config)
        )

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Return ``[batch, seq, hidden]`` for the same shape."""
        x = x + self.attention(self.attention_norm(x), position_ids)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Takes tokens and returns logits of the next token; or a pipeline stage of that.

    A stage without embedding takes hidden states, a stage without head returns them. Parameters
    have the same names as in the unsplit model.
    """

    embedding: nn.Embedding | None
    norm: nn.RMSNorm | None
    head: nn.Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.position_ids: Tensor | None = None  # of calls without positions, such as a pipeline's
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, experts=config.has_experts(layer)) for layer in layers}
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits ``[batch, seq, vocab]`` of tokens ``[batch, seq]``."""
        position_ids = self.position_ids if position_ids is None else position_ids
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, position_ids)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))

    def stage(self, layers: Collection[int]) -> "LanguageModel":
        """Return a stage with these layers, which it shares with this model."""
        with torch.device("meta"):
            part = LanguageModel(replace(self.config, num_hidden_layers=0))
        part.config = self.config
        part.blocks = nn.ModuleDict({str(layer): self.blocks[str(layer)] for layer in layers})
        part.embedding = self.embedding if 0 in layers else None
        ends = self.config.num_hidden_layers - 1 in layers
        part.norm, part.head = (self.norm, self.head) if ends else (None, None)
        return part


def call_built_in(model: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of a `LanguageModel`."""
    return cast(Tensor, model(tokens, positions))


def build_model(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    *,
    values: bool = True,
) -> LanguageModel:
    """Return the model. Initial values depend only on the seed and each parameter's name.

    Norms start at one. Matrices are normal with a deviation of one over the root of their width,
    divided by ``sqrt(2 * layers)`` if they write to the residual stream (GPT-2, section 2.3).
    Without ``values``, parameters are on the meta device.
    """
    if not values:
        return built_on_meta(lambda: LanguageModel(config), dtype, device)
    model = LanguageModel(config).to(device, dtype)
    depth = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            deviation = parameter.shape[-1] ** -0.5
            if name.rpartition(".weight")[0].endswith("wo") or ".w2" in name or "down_proj" in name:
                deviation *= depth
            parameter.copy_(normal(f"{seed}/{name}", parameter.shape) * deviation)
    return model


M = TypeVar("M", bound=nn.Module)


def built_on_meta(build: Callable[[], M], dtype: torch.dtype, device: torch.device | str) -> M:
    """Return a module with parameters on the meta device and buffers on ``device``."""
    with parameters_on_meta():
        model = build()
    model.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def seed_of(key: str) -> int:
    """Return a seed for torch that depends on ``key`` only."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def normal(key: str, shape: torch.Size) -> Tensor:
    """Return numbers of the standard normal distribution that depend on ``key`` only."""
    generator = torch.Generator().manual_seed(seed_of(key))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
