"""The model's and the run's numbers, without torch."""

from dataclasses import dataclass

# The order of a pass over the text has the seed ``seed * SEED_STRIDE + pass``, a signed 64-bit
# number for torch: these seeds leave room for SEED_STRIDE passes.
SEED_STRIDE = 1_000_003
SEEDS = range(-(2**63 // SEED_STRIDE), 2**63 // SEED_STRIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the language model; names follow the Hugging Face configurations.

    Every second block has a mixture of ``num_experts`` experts of width ``moe_intermediate_size``
    in the place of the feed-forward network of width ``intermediate_size``.
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

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What a step consumes and how it updates, equal whatever the degrees are.

    A step takes ``batch_size`` samples of ``seq_len`` bytes. The learning rate rises linearly over
    ``warmup_steps`` and then stays, so that it does not depend on how many steps a run has.
    """

    seed: int = 0
    batch_size: int = 8
    seq_len: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def learning_rate_of(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)
