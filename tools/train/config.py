"""Configurations of model and training. Needs no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hp_mesh import ModelShape, ParallelDimsError

# The order of a pass over the text has the seed ``seed * SEED_STRIDE + pass``, a signed 64-bit
# number for torch: these seeds leave room for SEED_STRIDE passes.
SEED_STRIDE = 1_000_003
SEEDS = range(-(2**63 // SEED_STRIDE), 2**63 // SEED_STRIDE)
# Styles in the tensor parallel plans of transformers that are supported here.
TP_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")
HELD_OUT_SHARE, MOST_HELD_OUT = 20, 512  # one sample in 20, at most 512
# Parts of the names of dropout probabilities in transformers, and prefixes of those that a causal
# language model does not use.
_RANDOM, _OTHER_HEADS = ("drop", "jitter"), ("classifier", "summary")
CATALOGUE = Path(__file__).parent / "catalogue"
BUILT_IN = "built-in"  # the model type of configurations of this trainer's own model


def held_out_samples(samples: int) -> int:
    """Return how many samples at the end of the text are held out for evaluation."""
    return min(max(1, samples // HELD_OUT_SHARE), MOST_HELD_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the language model; names follow the Hugging Face configurations.

    Every second block has ``num_experts`` experts of width ``moe_intermediate_size`` instead of a
    feed-forward network of width ``intermediate_size``. With 0 experts no block has them.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    intermediate_size: int = 256
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    router_aux_loss_coef: float = 0.01
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def has_experts(self, layer: int) -> bool:
        """Return whether the block of this number, from 0, has experts."""
        return self.num_experts > 0 and layer % 2 == 1

    @property
    def shape(self) -> ModelShape:
        """Return the sizes that determine FLOPs and memory."""
        sparse = sum(map(self.has_experts, range(self.num_hidden_layers)))
        return ModelShape(
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            ffn=self.intermediate_size,
            vocab=self.vocab_size,
            tied=self.tie_word_embeddings,
            experts=self.num_experts if sparse else 0,
            top_k=self.num_experts_per_tok if sparse else 0,
            expert_ffn=self.moe_intermediate_size,
            dense_layers=self.num_hidden_layers - sparse if sparse else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Batch and optimizer, equal for all degrees.

    A step takes ``batch_size`` samples of ``seq_len`` tokens, in ``accumulate`` microbatches. The
    learning rate rises linearly over ``warmup_steps``. Then it is constant, so that it does not
    depend on the number of steps. With ``decay_steps`` it falls along a cosine to ``least_rate``
    times its peak at that step, and is constant afterwards.
    """

    seed: int = 0
    batch_size: int = 8
    seq_len: int = 256
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    decay_steps: int | None = None
    least_rate: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def learning_rate_of(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        if step < self.warmup_steps or self.decay_steps is None:
            return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))
        done = (step + 1 - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        fallen = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.learning_rate * (self.least_rate + (1 - self.least_rate) * fallen)


class ModelError(ValueError):
    """The model is unknown, or its configuration is wrong or not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Configuration of a model of Hugging Face transformers.

    Attributes:
        fields: Content of the configuration file.
        numbers: The same with the library's defaults.
        tp_plan: The library's tensor parallel plan: a style for each pattern of module names.
    """

    fields: Mapping[str, Any]
    numbers: Mapping[str, Any]
    tp_plan: Mapping[str, str]

    @property
    def shape(self) -> ModelShape | None:
        """Return the sizes that determine FLOPs and memory, None if hp-mesh cannot estimate them.

        It cannot for models with state-space layers, for example. Training needs no estimate.
        """
        try:
            return ModelShape.from_config(self.numbers)
        except ParallelDimsError:
            return None

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary.

        Raises:
            ModelError: The configuration does not have it.
        """
        numbers = {**self.numbers, **(self.numbers.get("text_config") or {})}
        size = numbers.get("vocab_size")
        if type(size) is not int or size < 1:
            raise ModelError(f"vocab_size={size} is no number of tokens; use 1 or more")
        return size

    @property
    def dropouts(self) -> dict[str, float]:
        """Return the dropout probabilities and router noise above 0, by their names."""
        numbers = {**self.numbers, **(self.numbers.get("text_config") or {})}
        return {
            name: value
            for name, value in numbers.items()
            if any(word in name for word in _RANDOM) and not name.startswith(_OTHER_HEADS)
            if type(value) in (int, float) and value > 0
        }

    def with_vocabulary(self, size: int) -> "TransformersConfig":
        """Return the same model with another vocabulary size."""
        fields, numbers = ({**known, "vocab_size": size} for known in (self.fields, self.numbers))
        for known in (fields, numbers):
            if "text_config" in known:
                known["text_config"] = {**known["text_config"], "vocab_size": size}
        return TransformersConfig(fields=fields, numbers=numbers, tp_plan=self.tp_plan)


AnyModelConfig = ModelConfig | TransformersConfig


def read_model(name: str | None) -> AnyModelConfig:
    """Return the configuration in a JSON file or in the catalogue, or the default one.

    A file with the ``model_type`` `BUILT_IN` has fields of `ModelConfig`. Others are configurations
    of transformers, which must be installed.

    Raises:
        ModelError: The name is unknown or the configuration is wrong.
    """
    if name is None:
        return ModelConfig()
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    known = {file.stem: file for file in sorted(CATALOGUE.glob("*.json"))}
    if not path.is_file() and name not in known:
        raise ModelError(
            f"model={name} is neither a configuration file nor in the catalogue; use a JSON file "
            f"or {', '.join(known)}"
        )
    path = path if path.is_file() else known[name]
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model={name} cannot be read: {error}") from error
    kind = found.pop("model_type", None) if isinstance(found, dict) else None
    if not isinstance(kind, str):
        raise ModelError(f"model={name} has no model_type, which says what its fields mean")
    return _built_in(name, found) if kind == BUILT_IN else _of_transformers(name, kind, found)


def _built_in(name: str, found: Mapping[str, Any]) -> ModelConfig:
    kinds = {field.name: type(field.default) for field in fields(ModelConfig)}
    for key, value in found.items():
        if key not in kinds:
            raise ModelError(
                f"model={name} has {key}, which the built-in model has not; use {', '.join(kinds)}"
            )
        if type(value) is not kinds[key] and not (kinds[key] is float and type(value) is int):
            raise ModelError(f"model={name} has {key}={value!r}, which is no {kinds[key].__name__}")
    config = ModelConfig(**found)
    for key in ("rms_norm_eps", "rope_theta", "router_aux_loss_coef"):
        value, zero = getattr(config, key), key == "router_aux_loss_coef"
        if not (0 < value < math.inf or (zero and value == 0)):
            legal = "of 0 or more" if zero else "above 0"
            raise ModelError(f"model={name} has {key}={value}; use a number {legal}")
    if config.num_attention_heads < 1 or config.hidden_size % (2 * config.num_attention_heads):
        raise ModelError(
            f"model={name}: num_attention_heads={config.num_attention_heads} must leave heads of "
            f"an even width in hidden_size={config.hidden_size}"
        )
    return config


def _of_transformers(name: str, kind: str, found: Mapping[str, Any]) -> TransformersConfig:
    if find_spec("transformers") is None:
        raise ModelError(f"model={name} needs transformers: pip install transformers")
    from transformers import AutoConfig

    try:
        made = AutoConfig.for_model(kind, **found)
    except Exception as error:
        raise ModelError(
            f"model={name} is no model of transformers: {' '.join(str(error).split())[:300]}"
        ) from error
    if not getattr(made, "is_decoder", True):
        raise ModelError(
            f"model={name} is a {kind} with is_decoder=False, which sees the tokens that it is to "
            "predict; use is_decoder=true if the library supports it, or another model"
        )
    fields = {"model_type": kind, **found}
    plan = getattr(made, "base_model_tp_plan", None) or {}
    return TransformersConfig(fields=fields, numbers={**made.to_dict(), **fields}, tp_plan=plan)
