"""Shapes of published models."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ._shape import ModelShape


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """A model of arXiv 2205.05198, table 3."""
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=51200,
        glu=False,
        tied=False,
    )


def _llama3(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    """A model of The Llama 3 Herd of Models, table 3."""
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=128256
    )


def _named(shapes: Iterable[ModelShape]) -> Mapping[str, ModelShape]:
    return MappingProxyType({shape.name: shape for shape in shapes})


# The models with experts have the sizes of their published configuration files.
MODELS: Mapping[str, ModelShape] = _named(
    (
        _llama3("llama3-8b", 32, 4096, 32, 14336),
        _llama3("llama3-70b", 80, 8192, 64, 28672),
        _llama3("llama3-405b", 126, 16384, 128, 53248),
        _gpt("gpt-22b", 48, 6144, 64),
        _gpt("gpt-175b", 96, 12288, 96),
        _gpt("gpt-530b", 105, 20480, 128),
        _gpt("gpt-1t", 128, 25600, 160),
        ModelShape(
            name="mixtral-8x7b",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=32000,
            experts=8,
            top_k=2,
        ),
        ModelShape(
            name="mixtral-8x22b",
            layers=56,
            hidden=6144,
            heads=48,
            kv_heads=8,
            ffn=16384,
            vocab=32768,
            experts=8,
            top_k=2,
        ),
        ModelShape(
            name="qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            ffn=6144,
            vocab=151936,
            experts=128,
            top_k=8,
            expert_ffn=768,
        ),
        ModelShape(
            name="qwen3-235b-a22b",
            layers=94,
            hidden=4096,
            heads=64,
            kv_heads=4,
            head_dim=128,
            ffn=12288,
            vocab=151936,
            experts=128,
            top_k=8,
            expert_ffn=1536,
        ),
        ModelShape(
            name="llama4-scout",
            layers=48,
            hidden=5120,
            heads=40,
            kv_heads=8,
            ffn=16384,
            vocab=202048,
            experts=16,
            top_k=1,
            expert_ffn=8192,
            shared_ffn=8192,
        ),
        ModelShape(
            name="llama4-maverick",
            layers=48,
            hidden=5120,
            heads=40,
            kv_heads=8,
            ffn=16384,
            vocab=202048,
            experts=128,
            top_k=1,
            expert_ffn=8192,
            shared_ffn=8192,
            dense_layers=24,
        ),
        # Latent attention counts its queries as full projections, which adds 11% to the active
        # parameters and less than 1% to all.
        ModelShape(
            name="deepseek-v3",
            layers=61,
            hidden=7168,
            heads=128,
            head_dim=128,
            latent=512,
            ffn=18432,
            vocab=129280,
            experts=256,
            top_k=8,
            expert_ffn=2048,
            shared_ffn=2048,
            dense_layers=3,
        ),
    )
)
