"""What is trained, and how: sequences, batch, precision, recomputation, schedule, states."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .._errors import (
    Violation,
    amount_violations,
    choice_violations,
    flag_violations,
    integer_violations,
    number_violation,
    raise_errors,
    take_integers,
)

Recompute: TypeAlias = Literal["none", "selective", "selective-op", "full"]
Schedule: TypeAlias = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]
Zero: TypeAlias = Literal[0, 1, 2, 3] | None
Dtype: TypeAlias = Literal["float32", "bfloat16"]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "selective-op", "full")
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zero-bubble", "dualpipe")
STAGES: tuple[Zero, ...] = (None, 0, 1, 2, 3)
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BYTES = {"float32": 4, "bfloat16": 2}
ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """One optimizer step: AdamW in bf16 on ``global_batch`` sequences of ``seq_len`` tokens.

    Args:
        seq_len: Number of tokens of one sequence.
        global_batch: Number of sequences of one step.
        micro_batch: Number of sequences per microbatch on each data-parallel rank. None lets the
            planner choose.
        recompute: Activations that backward recomputes. ``"none"``; ``"selective"``: the attention
            core (arXiv 2205.05198, section 5); ``"selective-op"``: all but attention outputs and
            every second matrix product; ``"full"``: whole layers. None lets the planner choose.
        recompute_layers: Number of layers per pipeline rank that recompute. None means all. Invalid
            with ``recompute="none"``.
        float8: If True, linear layers multiply in fp8.
        schedule: Pipeline schedule. ``"1f1b"``; ``"interleaved"`` with ``virtual_stages`` stages
            per rank (arXiv 2104.04473); ``"zero-bubble"``: ZB-H1 (arXiv 2401.10241); ``"dualpipe"``
            (arXiv 2412.19437, section 3.2.1); ``"any"`` lets the planner choose.
        virtual_stages: Number of stages per pipeline rank with ``schedule="interleaved"`` or
            ``"any"``. 1 lets the planner choose. An interleaved schedule has at least 2.
        receive_buffers: Receive buffers of pipeline ranks. ``"in-flight"``: one for each microbatch
            in flight; ``"all"``: one for each microbatch of a step, as in
            ``torch.distributed.pipelining``.
        zero: ZeRO stage over ``dp_shard`` and ``cp`` (arXiv 1910.02054). 0: nothing is sharded; 1:
            optimizer state; 2: gradients too; 3: parameters too, gathered for every microbatch.
            None is stage 3 as in FSDP: with pipeline stages, parameters stay unsharded during the
            step and gradients are accumulated unsharded. ``"any"`` lets the planner choose.
        gradient_dtype: Dtype in which gradients are accumulated and reduced.
        moment_dtype: Dtype of the optimizer's two moments.
        fused: Kernels. True: attention does not store its scores (``"selective"`` then equals
            ``"none"``), and elementwise layers save only their inputs. ``"attention"``: only
            attention is fused. False: the kernels of arXiv 2205.05198.
        fused_loss: If True, the loss is computed in chunks of tokens, so that the logits of all
            tokens never exist at once (arXiv 2410.10989).
        attention: ``"native"``: kernels with the device's own instructions (cuDNN, Transformer
            Engine, FlashAttention-3); ``"flash-2"``: FlashAttention-2, as in
            ``scaled_dot_product_attention``.
        context: Communication over ``cp``. ``"ring"``: keys and values move around a ring;
            ``"all-gather"``: keys and values are gathered before attention (Llama 3, section
            3.3.2).
        dispatch: Communication of tokens to experts. ``"deduplicated"``: each token is sent once to
            each node (DeepEP); ``"copies"``: once for each of its experts.
        fp8_dispatch: If True, tokens are sent to experts in fp8. Results and gradients use bf16.
            Needs a model with experts.
        max_nodes: Largest number of nodes with experts of one token. None takes the limit from the
            model's groups of experts, if it has any. Needs a model with experts.
        memory_fraction: Share of a device's memory that a plan may use.

    Raises:
        ParallelDimsError: A value is invalid. The error lists all of them.

    Examples:
        >>> train = TrainSpec(seq_len=4096, global_batch=1024, zero=1, schedule="any")
        >>> train.tokens
        4194304
    """

    seq_len: int
    global_batch: int
    micro_batch: int | None = None
    recompute: Recompute | None = None
    recompute_layers: int | None = None
    float8: bool = False
    schedule: Schedule | Literal["any"] = "1f1b"
    virtual_stages: int = 1
    receive_buffers: Literal["in-flight", "all"] = "in-flight"
    zero: Zero | Literal["any"] = None
    gradient_dtype: Dtype = "float32"
    moment_dtype: Dtype = "float32"
    fused: bool | Literal["attention"] = True
    fused_loss: bool = False
    attention: Literal["native", "flash-2"] = "native"
    context: Literal["ring", "all-gather"] = "ring"
    dispatch: Literal["deduplicated", "copies"] = "deduplicated"
    fp8_dispatch: bool = False
    max_nodes: int | None = None
    memory_fraction: float = 0.95

    def __post_init__(self) -> None:
        names = ("seq_len", "global_batch", "micro_batch", "virtual_stages")
        take_integers(self, (*names, "recompute_layers", "max_nodes"))
        raise_errors(_violations(self))

    @property
    def tokens(self) -> int:
        """Number of tokens of one step."""
        return self.seq_len * self.global_batch

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient element."""
        return BYTES[self.gradient_dtype]

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's two moments for one parameter element."""
        return 2 * BYTES[self.moment_dtype]


def _violations(train: TrainSpec) -> Iterator[Violation]:
    sizes: dict[str, object] = {
        "seq_len": train.seq_len,
        "global_batch": train.global_batch,
        "virtual_stages": train.virtual_stages,
    }
    optional = ("micro_batch", "recompute_layers", "max_nodes")
    sizes |= {name: getattr(train, name) for name in optional if getattr(train, name) is not None}
    yield from integer_violations(sizes)
    flags = ("float8", "fused_loss", "fp8_dispatch")
    yield from flag_violations({name: getattr(train, name) for name in flags})
    if train.fused != "attention":
        yield from flag_violations({"fused": train.fused})
    if train.recompute is not None:
        yield from choice_violations("recompute", train.recompute, RECOMPUTE)
    if train.recompute == "none" and train.recompute_layers is not None:
        legal = "None, or another recompute than 'none'"
        yield number_violation("recompute_layers", train.recompute_layers, legal)
    yield from choice_violations("schedule", train.schedule, (*SCHEDULES, ANY))
    if train.zero != ANY and (isinstance(train.zero, bool) or train.zero not in STAGES):
        yield number_violation("zero", train.zero, "0, 1, 2, 3, None or 'any'")
    yield from choice_violations("gradient_dtype", train.gradient_dtype, DTYPES)
    yield from choice_violations("moment_dtype", train.moment_dtype, DTYPES)
    yield from choice_violations("receive_buffers", train.receive_buffers, ("in-flight", "all"))
    yield from choice_violations("attention", train.attention, ("native", "flash-2"))
    yield from choice_violations("context", train.context, ("ring", "all-gather"))
    yield from choice_violations("dispatch", train.dispatch, ("deduplicated", "copies"))
    if train.schedule not in ("interleaved", ANY) and train.virtual_stages != 1:
        legal = "1, or schedule='interleaved'"
        yield number_violation("virtual_stages", train.virtual_stages, legal)
    wrong = list(amount_violations({"memory_fraction": train.memory_fraction}))
    if not wrong and train.memory_fraction > 1:
        wrong = [number_violation("memory_fraction", train.memory_fraction, "1 or below")]
    yield from wrong
