"""The cases of the benchmark: models, degrees, sizes and batches."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from train.config import ModelConfig, TrainConfig
from train.data import IGNORED
from train.model import seed_of

from hp_cp import shift_labels

Size = Literal["full", "quick", "gpu"]

# Reference batches. Each arm trains on them in turn.
BATCHES = 3
# The weight decay and the clipping of the trainer. Clipping is active in each step.
TRAIN = TrainConfig(learning_rate=1e-4, warmup_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with one set of parallel degrees.

    Attributes:
        model: ``"Llama"``, the trainer's model without experts; or ``"MoE"``, in which every
            second block has experts.
        config: Shape of the model.
        dp: Number of groups of ranks with different samples.
        tp: Tensor parallel degree.
        cp: Context parallel degree.
        ep: Number of ranks over which the experts are distributed; 1 or ``dp``.
        rows: Samples per rank. A group of ``tp`` or ``cp`` ranks shares ``rows * tp * cp`` samples,
            so that all cases have the same number of tokens per rank.
        seq_len: Tokens per sample.
    """

    model: Literal["Llama", "MoE"]
    config: ModelConfig
    dp: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    rows: int
    seq_len: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.cp

    @property
    def fsdp(self) -> int:
        """Number of ranks over which parameters are sharded. It includes ``cp``."""
        return self.dp * self.cp

    @property
    def batch(self) -> int:
        """Samples of a step, of all ranks."""
        return self.rows * self.ranks

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.batch * self.seq_len

    @property
    def layout(self) -> str:
        """Degrees as text, such as ``"fsdp=2 x tp=2"``."""
        parts = [f"fsdp={self.dp}"]
        parts += [f"tp={self.tp}"] * (self.tp > 1) + [f"cp={self.cp}"] * (self.cp > 1)
        return " x ".join(parts) + f", ep={self.ep}" * (self.model == "MoE")

    @property
    def name(self) -> str:
        """Name of the row, such as ``"Llama, 4 ranks, fsdp=2 x tp=2"``."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.model}, {ranks}, {self.layout}"


_LLAMA = ModelConfig(
    vocab_size=512,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1024,
    num_experts=0,
)
# Neither side adds a balancing loss: the peer's layer has none.
_MOE = replace(
    _LLAMA,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=512,
    router_aux_loss_coef=0.0,
)
_QUICK = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
}
_GPU = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "moe_intermediate_size": 1408,
}
_CHANGES: dict[Size, dict[str, Any]] = {"full": {}, "quick": _QUICK, "gpu": _GPU}
_ROWS: dict[Size, tuple[int, int]] = {"full": (2, 256), "quick": (1, 16), "gpu": (2, 1024)}


def cases_of(ranks: int, size: Size) -> list[Case]:
    """Return the cases for a number of ranks.

    Tensor parallelism alone is left out: without FSDP, both sides would run the same code of torch.
    """
    change = _CHANGES[size]
    kv: dict[str, Any] = {"num_key_value_heads": 16} if size == "gpu" else {}
    llama, moe = replace(_LLAMA, **change, **kv), replace(_MOE, **change)
    rows, seq_len = _ROWS[size]

    def case(model: Literal["Llama", "MoE"], dp: int, tp: int = 1, cp: int = 1) -> Case:
        config, ep = (moe, dp) if model == "MoE" else (llama, 1)
        return Case(
            model=model, config=config, dp=dp, tp=tp, cp=cp, ep=ep, rows=rows, seq_len=seq_len
        )

    found = [case("Llama", ranks)]
    if ranks % 2 == 0:
        found += [case("Llama", ranks // 2, tp=2)] * (ranks > 2)
        found += [case("Llama", ranks // 2, cp=2)]
    return [*found, case("MoE", ranks)]


def host_case(case: Case) -> Case:
    """Return a copy of the case with the same modules and tensors of a few elements."""
    config = replace(
        case.config,
        vocab_size=16,
        hidden_size=2 * case.config.num_attention_heads,
        intermediate_size=8,
        moe_intermediate_size=8,
    )
    return replace(case, config=config, rows=1, seq_len=8)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and shifted labels of all ranks, ``[batch, seq_len]`` each."""
    found = []
    for number in range(BATCHES):
        generator = torch.Generator().manual_seed(seed_of(f"batch/{number}"))
        shape = case.batch, case.seq_len
        tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
        found.append((tokens, shift_labels(tokens)))
    return found


def count_of(labels: Tensor) -> int:
    """Return the number of labels that are not ignored."""
    return int((labels != IGNORED).sum())
