"""Which experts a token goes to."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives
from hp_dtensor.torch_compat import without_autocast

from ._errors import ExpertConfigError
from ._losses import (
    Routed,
    RoutingRecord,
    attach,
    load_balancing_share,
    sequence_balancing_share,
    z_share,
)
from ._parameters import local_weight
from ._sizes import check_choices, check_factors, check_groups, check_sizes, is_count
from ._torch import KeepsDtype, fenced
from .dispatch._local import count_ids

_TINY = torch.finfo(torch.float32).tiny

Score = Literal["softmax", "sigmoid"]


class TopKRouter(KeepsDtype):
    """Chooses ``top_k`` of ``num_experts`` experts for each token and computes their weights.

    The logits of a token are ``weight [num_experts, dim]`` times the token, plus
    ``gate_bias [num_experts]`` if there is one. A softmax over all experts, or a sigmoid, turns
    logits into scores. The token goes to the ``top_k`` experts with the largest scores, and these
    scores become its routing weights. Logits are computed in the wider of the dtypes of input and
    weight, also under autocast. Everything else is computed in float32 or wider, so that a float32
    router can be used in a bfloat16 layer.

    ``load_balance_loss``, ``sequence_loss`` and ``z_loss`` are coefficients of additional losses.
    The losses are not returned: their gradients are added in the backward of the routing weights.
    They are scaled for gradients that are summed over ranks. A gradient scaler does not scale them;
    with a gradient scaler, use `BalanceLoss` instead.

    Args:
        dim: Length of a token.
        num_experts: Number of experts of all ranks.
        top_k: Number of experts per token.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit (DeepSeek-V3, arXiv
            2412.19437, section 2.1.2). Defaults to ``"softmax"``.
        norm_topk_prob: If True, weights are divided by their sum. Defaults to True.
        routed_scaling_factor: Factor by which weights are multiplied. Defaults to 1.0.
        n_group: Number of groups into which the experts are divided, all of equal size. Defaults to
            1.
        topk_group: Number of groups from which a token may choose experts: the groups with the
            largest group scores. Defaults to None: all groups.
        group_score_experts: The score of a group is the sum of this number of its largest scores,
            with ``bias`` added to the scores. DeepSeek-V3 and transformers use 2, DeepSeek-V2 uses
            1 (arXiv 2405.04434, section 2.2.2). ``"share"`` means ``ceil(top_k / topk_group)``
            (arXiv 2412.19437, section 2.1.2). Defaults to 2.
        gate_bias: If True, the logits have a learned bias. Defaults to False.
        force_balance: For benchmarks. If True, tokens are assigned to experts in a fixed cyclic
            order, whatever their scores. The order starts at expert 0 on each rank and in each
            call, so results differ from one process. Defaults to False.
        noise: Standard deviation of normal noise on the logits in training (after Shazeer et al.,
            arXiv 1701.06538, section 4). Defaults to 0.0.
        load_balance_loss: Coefficient of the load-balancing loss of the whole batch; see
            `split_tokens_over`. Defaults to 0.0.
        sequence_loss: Coefficient of the mean load-balancing loss of single sequences (arXiv
            2412.19437, equations 17 to 20). A sequence without valid tokens counts as 0. Defaults
            to 0.0.
        z_loss: Coefficient of the mean squared logarithm of the softmax denominator (arXiv
            2202.08906, section 3.2). Defaults to 0.0.
        bias_rate: Amount by which `update_router_bias` changes the bias of an expert, to balance
            loads without a loss (Wang et al., arXiv 2408.15664, section 3). Defaults to 0.0.
        bias: If True, the router has the buffer ``bias``. Pass True without a ``bias_rate`` for a
            trained model with a fixed bias. Defaults to None: True if ``bias_rate`` is not 0.
        device: Device of the parameters. Defaults to the default device.
        dtype: Dtype of the parameters. Defaults to the default dtype.

    Attributes:
        load: Buffer ``[num_experts]``, int64, not saved: the number of this rank's tokens that
            chose each expert. Each backward adds the choices of its forward.
        bias: Buffer ``[num_experts]``, float32, saved; or None. The bias is added to the scores
            when experts are chosen, but not to the routing weights.

    Raises:
        ExpertConfigError: A size is not a positive int, ``top_k`` is larger than the number of
            experts in ``topk_group`` groups, ``n_group`` does not divide ``num_experts``, a factor
            is negative, ``score`` is unknown, or ``bias=False`` is given with a ``bias_rate``.

    Examples:
        >>> router = TopKRouter(dim=64, num_experts=8, top_k=2)
        >>> weights, expert_ids = router(torch.randn(16, 64))
        >>> weights.shape, expert_ids.shape
        (torch.Size([16, 2]), torch.Size([16, 2]))
    """

    load: Tensor
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int | None = None,
        group_score_experts: int | Literal["share"] = 2,
        gate_bias: bool = False,
        force_balance: bool = False,
        noise: float = 0.0,
        load_balance_loss: float = 0.0,
        sequence_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, object] = {"dim": dim, "num_experts": num_experts}
        if group_score_experts != "share":
            sizes["group_score_experts"] = group_score_experts
        check_sizes(sizes)
        check_choices(top_k, num_experts)
        check_groups(n_group, topk_group, num_experts, top_k)
        losses = dict(
            load_balance_loss=load_balance_loss, sequence_loss=sequence_loss, z_loss=z_loss
        )
        factors = dict(
            bias_rate=bias_rate, noise=noise, routed_scaling_factor=routed_scaling_factor
        )
        check_factors({**losses, **factors})
        if score not in ("softmax", "sigmoid"):
            raise ExpertConfigError(f"score={score!r} is not one of ['softmax', 'sigmoid']")
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = float(routed_scaling_factor)
        self.n_group = n_group
        self.topk_group = n_group if topk_group is None else topk_group
        self.group_score_experts = group_score_experts
        self.force_balance = force_balance
        self.noise = float(noise)
        self.load_balance_loss = float(load_balance_loss)
        self.sequence_loss = float(sequence_loss)
        self.z_loss = float(z_loss)
        self.bias_rate = float(bias_rate)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.gate_bias = (
            nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
            if gate_bias
            else None
        )
        load = torch.empty(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("load", load, persistent=False)
        has_bias = bool(bias_rate) if bias is None else bias
        if bias_rate and not has_bias:
            raise ExpertConfigError(
                f"bias=False leaves bias_rate={bias_rate} nothing to move; leave one of them out"
            )
        values = torch.empty(num_experts, dtype=torch.float32, device=device) if has_bias else None
        self.register_buffer("bias", values)
        self.token_axes: tuple[Axis, ...] | None = None
        self.experts_are_split = False
        self.sequence_axes: tuple[Axis, ...] = ()
        self.replicated_over: Axis | None = None
        self.collectives: Collectives = TorchCollectives()
        self.record: RoutingRecord | None = None
        self.reset_parameters()

    @property
    def needs_whole_batch(self) -> str:
        """Reason why this router needs the loads of all ranks, as text; empty if it does not.

        Losses and ``bias_rate`` need them.
        """
        if self.load_balance_loss:
            return f"load_balance_loss={self.load_balance_loss} is the loss of the whole batch"
        if self.sequence_loss:
            return f"sequence_loss={self.sequence_loss} is the mean over all sequences"
        if self.z_loss:
            return f"z_loss={self.z_loss} is the mean over the whole batch"
        if self.bias_rate:
            return f"bias_rate={self.bias_rate} follows the load of the whole batch"
        return ""

    def extra_repr(self) -> str:
        """Return the sizes and the options for ``print``.

        Returns:
            The sizes, and the options that differ from their defaults.
        """
        text = f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        text += f", load_balance_loss={self.load_balance_loss}"
        options: dict[str, tuple[object, object]] = {
            "score": (self.score, "softmax"),
            "norm_topk_prob": (self.norm_topk_prob, True),
            "routed_scaling_factor": (self.routed_scaling_factor, 1.0),
            "n_group": (self.n_group, 1),
            "topk_group": (self.topk_group, self.n_group),
            "group_score_experts": (self.group_score_experts, 2),
            "gate_bias": (self.gate_bias is not None, False),
            "force_balance": (self.force_balance, False),
            "noise": (self.noise, 0.0),
            "sequence_loss": (self.sequence_loss, 0.0),
            "z_loss": (self.z_loss, 0.0),
            "bias_rate": (self.bias_rate, 0.0),
            "bias": (self.bias is not None, bool(self.bias_rate)),
        }
        said = [f"{k}={value!r}" for k, (value, default) in options.items() if value != default]
        return ", ".join([text, *said])

    def reset_parameters(self) -> None:
        """Initialize parameters uniformly within ``1 / sqrt(dim)``, and set buffers to 0."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.gate_bias is not None:
            nn.init.uniform_(self.gate_bias, -bound, bound)
        self.load.zero_()
        if self.bias is not None:
            self.bias.zero_()

    def split_tokens_over(
        self,
        axes: AxisMesh | Sequence[Axis],
        collectives: Collectives | None = None,
        *,
        sequence_axes: AxisMesh | Sequence[Axis] = (),
    ) -> None:
        """Set the axes that split the tokens of a batch, so that losses cover the whole batch.

        Styles call this method with their ``token_axes``. If the router has a loss, each training
        forward then communicates one small all-reduce per axis.

        Args:
            axes: All axes on which ranks hold different tokens: a mesh or `Axis` objects. These are
                the data and context parallel axes, and the tensor parallel axis if the input is
                sharded by sequence.
            collectives: Implementation of the collectives. Defaults to None: unchanged. A new
                router uses ``torch.distributed``.
            sequence_axes: Subset of ``axes`` on which ranks hold equal parts of the same sequences.
                ``sequence_loss`` communicates one more all-reduce over each of them. Defaults to
                ``()``.

        Raises:
            ExpertConfigError: An axis of ``sequence_axes`` is not in ``axes``, or ``axes`` include
                ranks that hold the same tokens, because a style splits each expert over them.
        """
        over = as_axes(axes)
        check_apart(axes, self.replicated_over)
        self.sequence_axes = check_axes(over, sequence_axes)
        self.token_axes = over
        if collectives is not None:
            self.collectives = collectives

    def forward(
        self, x: Tensor, sequence_ids: Tensor | None = None, num_sequences: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Equal inputs give equal ids, so recomputed activations go to the same experts.

        Args:
            x: Tokens ``[tokens, dim]``.
            sequence_ids: Index of the sequence of each token, ``[tokens]``, int64, from 0 to
                ``num_sequences - 1``. Only ``sequence_loss`` uses it. Defaults to None: all tokens
                are in one sequence.
            num_sequences: Number of sequences. Defaults to 1.

        Returns:
            ``(weights, expert_ids)``, both ``[tokens, top_k]``. The ids are int64.

        Raises:
            ExpertConfigError: ``x`` is not ``[tokens, dim]`` with a floating dtype, or
                ``sequence_ids`` has a wrong shape, dtype or value. Values are checked on the CPU
                only. Raised on this rank only.
        """
        check_tokens(x, self.dim)
        if sequence_ids is not None:
            check_sequences(sequence_ids, x.shape[0], num_sequences)
        weight = local_weight(self.weight, self.replicated_over)
        bias = (
            None if self.gate_bias is None else local_weight(self.gate_bias, self.replicated_over)
        )
        # Not more exact than both are: a product of narrow numbers stays a narrow, fast one.
        dtype = torch.promote_types(x.dtype, weight.dtype)
        with without_autocast(x.device):
            gate_bias = None if bias is None else bias.to(dtype)
            logits = F.linear(x.to(dtype), weight.to(dtype), gate_bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.noise and self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        expert_ids = self._choose(scores)
        weights = scores.gather(1, expert_ids)
        if self.norm_topk_prob:
            # Sigmoids can all be zero; a softmax's largest never are.
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=_TINY)
        if self.routed_scaling_factor != 1:
            weights = weights * self.routed_scaling_factor
        if self.record is not None:
            self.record.add(
                Routed(
                    probabilities=self._shares(scores).sum(0),
                    counts=count_ids(expert_ids, self.num_experts),
                    num_tokens=x.shape[0],
                )
            )
        if self.training and torch.is_grad_enabled():
            counts = count_ids(expert_ids, self.num_experts)
            total = self._loss(logits, scores, counts)
            if self.sequence_loss:
                if sequence_ids is None:
                    sequence_ids = expert_ids.new_zeros(expert_ids.shape[0])
                balance = self._sequence_loss(scores, expert_ids, sequence_ids, num_sequences)
                total = total + self.sequence_loss * balance
            weights = attach(weights, total, self._add_load, counts)
        return weights, expert_ids

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the ids ``[tokens, top_k]`` of the largest ``scores [tokens, experts]`` plus bias.

        Carries no gradient; equal scores give equal ids.
        """
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
        if self.force_balance:
            turns = torch.arange(scores.shape[0] * self.top_k, device=scores.device)
            return (turns % self.num_experts).view(-1, self.top_k)
        if self.topk_group < self.n_group:
            groups = ranked.unflatten(1, (self.n_group, -1))
            best = self.group_score_experts
            if best == "share":
                best = -(-self.top_k // self.topk_group)
            worth = groups.topk(min(best, groups.shape[2])).values.sum(-1)
            kept = worth.topk(self.topk_group).indices
            dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
            dropped = dropped.scatter_(1, kept, torch.zeros_like(kept, dtype=torch.bool))
            ranked = groups.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
        return ranked.topk(self.top_k).indices

    def _add_load(self, counts: Tensor) -> None:
        """Count the choices of one forward; runs in its backward."""
        load = self.counted_load()
        load += counts

    def counted_load(self) -> Tensor:
        """Return the buffer ``load``, and create it if the router was built on the meta device.

        Returns:
            ``load`` on the device of the weight.
        """
        device = self.weight.device
        if self.load.is_meta and device.type != "meta":
            self.load = torch.zeros_like(self.load, device=device)
        return self.load

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.load.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.load.is_meta:  # not saved, so nothing else would overwrite it
            self.load.zero_()
        return self

    def _loss(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        total = scores.new_zeros(())
        if not (self.load_balance_loss or self.z_loss):
            return total
        tokens = counts.new_full((1,), scores.shape[0])
        totals = torch.cat([counts, tokens])
        totals = sum_over(self.token_axes or (), totals, self.collectives)
        if self.load_balance_loss:
            balance = load_balancing_share(
                self._shares(scores), totals[:-1], totals[-1], self.top_k
            )
            total = total + self.load_balance_loss * balance
        if self.z_loss:
            total = total + self.z_loss * z_share(logits, totals[-1])
        return total

    def _sequence_loss(
        self, scores: Tensor, expert_ids: Tensor, sequence_ids: Tensor, num_sequences: int
    ) -> Tensor:
        places = sequence_ids[:, None] * self.num_experts + expert_ids
        counts = count_ids(places, num_sequences * self.num_experts)
        counts = sum_over(self.sequence_axes, counts, self.collectives)
        cut = [axis.ranks for axis in self.sequence_axes]
        # The other ranks have the same sequences.
        over = [axis for axis in self.token_axes or () if axis.ranks not in cut]
        total = sum_over(over, counts.new_full((1,), num_sequences), self.collectives)
        counts = counts.view(num_sequences, self.num_experts)  # a number of 0 leaves -1 undefined
        return sequence_balancing_share(
            self._shares(scores), sequence_ids, counts, total[0], self.top_k
        )

    def _shares(self, scores: Tensor) -> Tensor:
        """Return scores that sum to one for each token."""
        if self.score == "softmax":
            return scores
        return scores / scores.sum(-1, keepdim=True).clamp(min=_TINY)


def sum_over(axes: Sequence[Axis], numbers: Tensor, collectives: Collectives) -> Tensor:
    """Return ``numbers`` summed over the ranks of ``axes``: one all-reduce for each."""
    return _sum_over(axes, numbers, collectives) if axes else numbers


@fenced
def _sum_over(axes: Sequence[Axis], numbers: Tensor, collectives: Collectives) -> Tensor:
    for axis in axes:
        (numbers,) = collectives.all_reduce(axis, [numbers]).wait()
    return numbers


def as_axes(axes: AxisMesh | Sequence[Axis]) -> tuple[Axis, ...]:
    """Return ``axes``, or all axes of a mesh; communicates nothing."""
    if isinstance(axes, Sequence):
        if not all(isinstance(axis, Axis) for axis in axes):
            raise ExpertConfigError(f"token axes {axes!r} are not a mesh or a sequence of Axis")
        for one, other in combinations(axes, 2):
            if len(set(one.ranks) & set(other.ranks)) > 1:
                raise ExpertConfigError(
                    f"token axes {one.name}={list(one.ranks)} and {other.name}="
                    f"{list(other.ranks)} share ranks, whose tokens would count twice; leave one "
                    "of them out"
                )
        return tuple(axes)
    return tuple(Axis.of(axes, i) for i in range(axes.ndim))


def check_apart(axes: AxisMesh | Sequence[Axis], alike: Axis | None) -> None:
    """Raise an `ExpertConfigError` where ``axes`` split tokens over ranks of ``alike``.

    Those hold the same tokens, so a sum over ``axes`` would count a token once for each of them.
    Communicates nothing.
    """
    if alike is None:
        return
    split = [set(axis.ranks) for axis in as_axes(axes)]
    if not isinstance(axes, Sequence):  # the axes together, of which each may have one such rank
        split.append(set(torch.tensor(axes.mesh.tolist()).flatten().tolist()))
    if any(len(ranks & set(alike.ranks)) > 1 for ranks in split):
        names = [axis.name for axis in as_axes(axes)]
        raise ExpertConfigError(
            f"token axes {names} split tokens over {alike.name}={alike.size}, whose ranks cut "
            "experts inside and hold the same tokens: loads and losses would count a token once "
            f"for each; leave {alike.name} out of them, () where no other axis splits tokens"
        )


def check_axes(
    token_axes: Sequence[Axis], sequence_axes: AxisMesh | Sequence[Axis]
) -> tuple[Axis, ...]:
    """Return ``sequence_axes``; raise an `ExpertConfigError` where one splits no tokens."""
    cut, known = as_axes(sequence_axes), [axis.ranks for axis in token_axes]
    strange = [axis.name for axis in cut if axis.ranks not in known]
    if strange:
        raise ExpertConfigError(
            f"sequence axes {strange} are not among the token axes "
            f"{[axis.name for axis in token_axes]}; what cuts sequences splits tokens too"
        )
    return cut


def check_tokens(x: Tensor, dim: int) -> None:
    """Raise an `ExpertConfigError` unless ``x`` is a floating ``[tokens, dim]``."""
    if x.dim() != 2 or x.shape[1] != dim or not x.is_floating_point():
        raise ExpertConfigError(
            f"the router got {x.dtype} of shape {tuple(x.shape)}; give a floating dtype of shape "
            f"[tokens, {dim}]"
        )


def check_sequences(ids: Tensor, num_tokens: int, num_sequences: int) -> None:
    """Raise an `ExpertConfigError` unless ``ids [num_tokens]`` name one of the sequences each."""
    if ids.shape != (num_tokens,) or ids.dtype != torch.int64:
        raise ExpertConfigError(
            f"sequence_ids are {ids.dtype} of shape {tuple(ids.shape)}; give torch.int64 of shape "
            f"({num_tokens},), one for each token"
        )
    if not is_count(num_sequences, 0):
        raise ExpertConfigError(f"num_sequences={num_sequences!r} must be an integer of at least 0")
    if not ids.is_cpu or not num_tokens or torch.compiler.is_compiling():
        return  # looking would synchronise, or end the graph
    least, most = (edge.item() for edge in ids.aminmax())
    if least < 0 or most >= num_sequences:
        raise ExpertConfigError(
            f"sequence_ids from {least} to {most} of num_sequences={num_sequences}; use 0 .. "
            f"{num_sequences - 1}"
        )
