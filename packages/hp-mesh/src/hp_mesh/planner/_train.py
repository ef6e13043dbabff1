"""What is trained: sequences, batch, precision, recomputation, schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._errors import Violation, raise_errors
from ._numbers import (
    amount_violations,
    choice_violations,
    flag_violations,
    integer_violations,
    number_violation,
    take_integers,
)

Recompute: TypeAlias = Literal["none", "selective", "selective-op", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "selective-op", "full")
SCHEDULES = ("1f1b", "interleaved")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """One optimizer step: ``global_batch`` sequences of ``seq_len`` tokens, bf16 with AdamW.

    ``micro_batch`` counts the sequences that go through the model at once on each data-parallel
    rank, ``recompute`` says what the backward computes again: ``"none"``; ``"selective"``, the
    attention core (arXiv 2205.05198, section 5); ``"selective-op"``, all but the attention outputs
    and every second matrix product; ``"full"``, whole layers. None leaves a choice to the planner.
    ``float8`` multiplies linear layers in fp8. ``"interleaved"`` gives every pipeline rank
    ``virtual_stages`` stages. With ``fused`` kernels attention stores no scores, so that
    ``"selective"`` equals ``"none"``, and what elementwise layers give is computed again where it
    is used; without, kernels are those of the paper. ``memory_fraction`` of a device may be planned
    for. Raises `ParallelDimsError` with every wrong value.
    """

    seq_len: int
    global_batch: int
    micro_batch: int | None = None
    recompute: Recompute | None = None
    float8: bool = False
    schedule: Literal["1f1b", "interleaved"] = "1f1b"
    virtual_stages: int = 1
    fused: bool = True
    memory_fraction: float = 0.95

    def __post_init__(self) -> None:
        take_integers(self, ("seq_len", "global_batch", "micro_batch", "virtual_stages"))
        raise_errors(_violations(self))

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.seq_len * self.global_batch


def _violations(train: TrainSpec) -> Iterator[Violation]:
    sizes: dict[str, object] = {
        "seq_len": train.seq_len,
        "global_batch": train.global_batch,
        "virtual_stages": train.virtual_stages,
    }
    if train.micro_batch is not None:
        sizes["micro_batch"] = train.micro_batch
    yield from integer_violations(sizes)
    yield from flag_violations({"float8": train.float8, "fused": train.fused})
    if train.recompute is not None:
        yield from choice_violations("recompute", train.recompute, RECOMPUTE)
    yield from choice_violations("schedule", train.schedule, SCHEDULES)
    if train.schedule == "1f1b" and train.virtual_stages != 1:
        legal = "1, or schedule='interleaved'"
        yield number_violation("virtual_stages", train.virtual_stages, legal)
    wrong = list(amount_violations({"memory_fraction": train.memory_fraction}))
    if not wrong and train.memory_fraction > 1:
        wrong = [number_violation("memory_fraction", train.memory_fraction, "1 or below")]
    yield from wrong
