"""Settings of a training run: batch, precision, recomputation, schedule, sharding and kernels."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from .._errors import Violation, join_words, number_violation, raise_errors
from ._fields import check_fields, option, optional
from ._schedules import ADJUSTABLE, SCHEDULES, ScheduleName

Recompute: TypeAlias = Literal["none", "selective", "selective-op", "full"]
Zero: TypeAlias = Literal[0, 1, 2, 3] | None
Dtype: TypeAlias = Literal["float32", "bfloat16"]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "selective-op", "full")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
BYTES = {"float32": 4, "bfloat16": 2}
ANY: Final = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """Settings of a training run. The optimizer is AdamW, and computation is in bf16.

    Args:
        seq_len: Number of tokens of one sequence.
        global_batch: Number of sequences of one training step, over all ranks.
        micro_batch: Number of sequences per microbatch on each data-parallel rank. By default the
            planner chooses.
        recompute: Activations that are not saved, but recomputed in backward. By default the
            planner chooses one of these kinds:

            - ``"none"``: nothing is recomputed.
            - ``"selective"``: the attention core (arXiv 2205.05198, section 5).
            - ``"selective-op"``: everything except the outputs of attention and of every second
              matrix product.
            - ``"full"``: whole layers.
        recompute_layers: Number of layers per pipeline rank to which ``recompute`` applies. By
            default it applies to all layers. Must be None with ``recompute="none"``.
        float8: If True, linear layers multiply in fp8.
        schedule: Pipeline schedule.

            - ``"1f1b"``: one forward, one backward (arXiv 2104.04473).
            - ``"interleaved"``: 1F1B with several stages per rank (arXiv 2104.04473).
            - ``"zero-bubble"``: ZB-H1 (arXiv 2401.10241).
            - ``"dualpipe"``: DualPipe (arXiv 2412.19437, section 3.2.1).
            - ``"any"``: the planner chooses.
        virtual_stages: Number of stages per pipeline rank of the schedule ``"interleaved"``. 1 (the
            default) means that the planner chooses a number of at least 2. A number above 1 needs
            the schedule ``"interleaved"`` or ``"any"``.
        receive_buffers: Number of receive buffers of a pipeline rank. ``"in-flight"``: one for each
            microbatch in flight. ``"all"``: one for each microbatch of a step, as in
            ``torch.distributed.pipelining``.
        zero: ZeRO stage over ``dp_shard`` and ``cp`` (arXiv 1910.02054).

            - 0: nothing is sharded.
            - 1: the optimizer state is sharded.
            - 2: the optimizer state and gradients are sharded.
            - 3: the optimizer state, gradients and parameters are sharded. Each weight has its own
              all-gather, which does not overlap with computation, as in DeepSpeed.
            - None: the optimizer state, gradients and parameters are sharded. Each layer has one
              all-gather, which is prefetched, as in FSDP. With pipeline stages, parameters and
              gradients are unsharded from the start to the end of a step.
            - ``"any"``: the planner chooses among None, 1, 2 and 3.
        gradient_dtype: Dtype in which gradients are accumulated and reduced.
        moment_dtype: Dtype of the optimizer's two moments.
        fused: Operations that use fused kernels.

            - True: all operations. Attention does not store its scores, so
              ``recompute="selective"`` equals ``"none"``. Elementwise operations save only their
              inputs.
            - ``"attention"``: only attention.
            - False: no operation, as in arXiv 2205.05198.
        fused_loss: If True, the loss is computed in chunks of tokens, so that the logits of all
            tokens are never in memory at the same time (arXiv 2410.10989).
        attention: Fused attention kernels. ``"native"``: kernels for the newest instructions of the
            device (cuDNN, Transformer Engine, FlashAttention-3). ``"flash-2"``: FlashAttention-2,
            as in ``scaled_dot_product_attention``.
        context: Communication over ``cp``. ``"ring"``: keys and values are sent around a ring of
            ranks. ``"all-gather"``: keys and values are gathered before attention (The Llama 3 Herd
            of Models, section 3.3.2).
        dispatch: Communication of tokens to experts. ``"deduplicated"``: a token is sent once to
            each node with at least one of its experts, as in DeepEP. ``"copies"``: a token is sent
            once for each of its experts.
        fp8_dispatch: If True, tokens are sent to experts in fp8. Results and gradients use bf16.
            Needs a model with experts.
        max_nodes: Largest number of nodes to which one token is sent. By default,
            ``top_groups`` of the `ModelShape` may limit the number. Needs a model with experts.
        memory_fraction: Share of a device's memory that a plan may use.

    Raises:
        ParallelDimsError: A value is invalid. The error lists all of them.

    Examples:
        >>> train = TrainSpec(seq_len=4096, global_batch=1024, zero=1, schedule="any")
        >>> train.tokens
        4194304
    """

    seq_len: int = field(metadata=option("length of a sequence", unit="tokens"))
    global_batch: int = field(
        metadata=option("size of an optimizer step, over all ranks", unit="sequences")
    )
    micro_batch: int | None = optional(
        None, "size of a microbatch (default: the best)", unit="sequences"
    )
    recompute: Recompute | None = optional(
        None,
        "activations that backward recomputes: none; selective: the attention core; "
        "selective-op: all but attention outputs and every second matrix product; "
        "full: whole layers (default: the best)",
        choices=RECOMPUTE,
    )
    recompute_layers: int | None = optional(
        None, "layers per pipeline rank that recompute (default: all)", unit="layers"
    )
    float8: bool = optional(False, "multiply linear layers in fp8")
    schedule: ScheduleName | Literal["any"] = optional(
        "1f1b", "pipeline schedule; any: the best", choices=(*SCHEDULES, ANY)
    )
    virtual_stages: int = optional(
        1, "stages per pipeline rank of an interleaved schedule; 1: the best", unit="stages"
    )
    receive_buffers: Literal["in-flight", "all"] = optional(
        "in-flight",
        "receive buffers of a pipeline rank: for the microbatches in flight, or for all of a "
        "step, as in torch.distributed.pipelining",
        choices=("in-flight", "all"),
    )
    zero: Zero | Literal["any"] = optional(
        None,
        "ZeRO stage; none: as in FSDP, which is stage 3 with one gather and one reduction per "
        "step if there are pipeline stages; any: the best (default: none)",
        choices=(0, 1, 2, 3, None, ANY),
    )
    gradient_dtype: Dtype = optional(
        "float32", "dtype in which gradients are accumulated and reduced", choices=DTYPES
    )
    moment_dtype: Dtype = optional("float32", "dtype of the optimizer's moments", choices=DTYPES)
    fused: bool | Literal["attention"] = optional(
        True,
        "use fused kernels everywhere, nowhere or for attention only",
        choices=(True, False, "attention"),
    )
    fused_loss: bool = optional(
        False, "compute the loss in chunks, so that not all logits exist at once"
    )
    attention: Literal["native", "flash-2"] = optional(
        "native",
        "attention kernels: the device's own, or FlashAttention-2",
        choices=("native", "flash-2"),
    )
    context: Literal["ring", "all-gather"] = optional(
        "ring", "communication over cp", choices=("ring", "all-gather")
    )
    dispatch: Literal["deduplicated", "copies"] = optional(
        "deduplicated",
        "send a token once per node with experts of it, or once per expert",
        choices=("deduplicated", "copies"),
    )
    fp8_dispatch: bool = optional(False, "send tokens to experts in fp8")
    max_nodes: int | None = optional(
        None, "nodes that may have experts of one token (default: the model's limit)", unit="nodes"
    )
    memory_fraction: float = optional(
        0.95, "part of a device's memory that a plan may use", unit="fraction"
    )

    def __post_init__(self) -> None:
        raise_errors([*check_fields(self), *_violations(self)])

    @property
    def tokens(self) -> int:
        """Number of tokens of one training step, over all ranks."""
        return self.seq_len * self.global_batch

    @property
    def gradient_bytes(self) -> int:
        """Number of bytes of one element of a gradient."""
        return BYTES[self.gradient_dtype]

    @property
    def moment_bytes(self) -> int:
        """Number of bytes of both optimizer moments for one element of a parameter."""
        return 2 * BYTES[self.moment_dtype]


def _violations(train: TrainSpec) -> Iterator[Violation]:
    if train.recompute == "none" and train.recompute_layers is not None:
        legal = "None, or another recompute than 'none'"
        yield number_violation("recompute_layers", train.recompute_layers, legal)
    if train.schedule not in (*ADJUSTABLE, ANY) and train.virtual_stages != 1:
        legal = f"1, or schedule={join_words(map(repr, ADJUSTABLE))}"
        yield number_violation("virtual_stages", train.virtual_stages, legal)
