"""Which experts a token goes to."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from .._errors import ExpertConfigError
from .._parameters import local_weight
from .._sizes import check_choices, check_factors, check_groups, check_sizes
from .._torch import KeepsDtype, without_autocast
from ..dispatch._local import count_ids
from ._choice import choose_experts
from ._inputs import check_sequences, check_tokens
from ._losses import (
    Routed,
    RoutingRecord,
    attach,
    load_balancing_share,
    sequence_balancing_share,
    z_share,
)

_TINY = torch.finfo(torch.float32).tiny

Score = Literal["softmax", "sigmoid"]


class TopKRouter(KeepsDtype):
    """Chooses ``top_k`` of ``num_experts`` for each token, with weights.

    Scores are a softmax over all experts of ``weight [num_experts, dim]`` times the token, or with
    ``score="sigmoid"`` each expert's own (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Weights
    are the scores of the ``top_k`` largest, divided by their sum unless ``normalise`` is False,
    times ``scale``. Logits are computed in the wider dtype of input and weight, also under
    autocast, the rest in float32 or in that dtype where it is wider still; a float32 router may
    serve a layer in bfloat16. ``noise`` is the deviation of a normal added to the logits while
    training (the idea of Shazeer et al., arXiv 1701.06538, section 4, which recomputation repeats
    where it restores the random state).

    With ``num_groups`` equal blocks of experts, a token chooses from its best ``top_groups`` groups
    alone. A group's score is the sum of the ``n`` largest ``s_e + b_e`` of its experts ``e``, with
    the scores ``s``, the biases ``b`` (0 without) and ``n = group_score_experts``. The default is
    that of the published models and of transformers (DeepSeek-V3 and those that follow it), which
    take 2 whatever the other numbers are; arXiv 2412.19437, section 2.1.2, states
    ``ceil(top_k / top_groups)``, the same for 8 experts in 4 groups, and DeepSeek-V2 takes 1
    (arXiv 2405.04434, section 2.2.2).

    Several things keep loads even while training. ``load_balance_loss`` times the load-balancing
    loss of the whole batch (see `split_tokens_over`), ``sequence_loss`` times the mean of that of
    each sequence alone (arXiv 2412.19437, equations 17 to 20; one without valid tokens counts in
    the mean, with 0) and ``z_loss`` times the mean squared
    logarithm of the softmax's denominator (arXiv 2202.08906, section 3.2) enter the gradient
    through the weights and are not returned. They are added to a loss that is summed over ranks;
    what else scales that loss scales them if it is in the attribute ``loss_scale`` when backward
    runs: a gradient scaler's factor, the number of ranks over which gradients are averaged. With
    ``bias_rate``, the buffer ``bias [num_experts]`` (saved; float32 even where the model is cast)
    is added to scores where experts are chosen, not to weights, and `update_router_bias` moves it
    (loss-free balancing, Wang et al., arXiv 2408.15664, section 3). ``bias=True`` without a rate is
    a frozen one, of a model that was trained with it: loaded, saved and used, and never moved.

    The buffer ``load [num_experts]`` (int64, not saved) grows in backward by the number of times
    that this rank chose each expert; where neither input nor weight needs a gradient, nothing is
    counted. It starts at zero, also where the router gets its memory after initialisation on the
    meta device. ``token_axes`` are the axes given to `split_tokens_over`, None
    before; ``replicated_over`` is the axis whose ranks hold the same tokens, as a style sets it.
    `ExpertConfigError` for sizes that are no positive integers, ``top_k`` of more than all
    experts or than the kept groups have, groups that do not divide, negative factors, and a rate
    without a bias.
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
        normalise: bool = True,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int | None = None,
        group_score_experts: int = 2,
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
        check_sizes(
            {"dim": dim, "num_experts": num_experts, "group_score_experts": group_score_experts}
        )
        check_choices(top_k, num_experts)
        check_groups(num_groups, top_groups, num_experts, top_k)
        losses = dict(
            load_balance_loss=load_balance_loss, sequence_loss=sequence_loss, z_loss=z_loss
        )
        check_factors({**losses, "bias_rate": bias_rate, "noise": noise, "scale": scale})
        if score not in ("softmax", "sigmoid"):
            raise ExpertConfigError(f"score={score!r} is not one of ['softmax', 'sigmoid']")
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.normalise = normalise
        self.scale = float(scale)
        self.num_groups = num_groups
        self.top_groups = num_groups if top_groups is None else top_groups
        self.group_score_experts = group_score_experts
        self.noise = float(noise)
        self.load_balance_loss = float(load_balance_loss)
        self.sequence_loss = float(sequence_loss)
        self.z_loss = float(z_loss)
        self.bias_rate = float(bias_rate)
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
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
        self.sequence_axes: tuple[Axis, ...] = ()
        self.replicated_over: Axis | None = None
        self.loss_scale: float | Tensor = 1.0
        self.collectives: Collectives = TorchCollectives()
        self.record: RoutingRecord | None = None
        self.reset_parameters()

    @property
    def needs_whole_batch(self) -> str:
        """Return why the load of all ranks is needed, '' where it is not."""
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
        """Return the sizes and the options that are set, as ``print`` shows them."""
        text = f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"
        text += f", load_balance_loss={self.load_balance_loss}"
        options: dict[str, tuple[object, object]] = {
            "score": (self.score, "softmax"),
            "normalise": (self.normalise, True),
            "scale": (self.scale, 1.0),
            "num_groups": (self.num_groups, 1),
            "top_groups": (self.top_groups, self.num_groups),
            "group_score_experts": (self.group_score_experts, 2),
            "noise": (self.noise, 0.0),
            "sequence_loss": (self.sequence_loss, 0.0),
            "z_loss": (self.z_loss, 0.0),
            "bias_rate": (self.bias_rate, 0.0),
            "bias": (self.bias is not None, bool(self.bias_rate)),
        }
        said = [f"{k}={value!r}" for k, (value, default) in options.items() if value != default]
        return ", ".join([text, *said])

    def reset_parameters(self) -> None:
        """Draw the weight anew, uniform within ``1 / sqrt(dim)``; set load and bias to zero."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
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
        """Say which axes split the batch's tokens, so that losses are those of the whole batch.

        ``axes`` are all axes of a mesh, or `Axis` objects, on which ranks hold *different* tokens:
        data and context parallel, and tensor parallel where the input is sharded by sequence. With
        a loss each training forward then makes one small all-reduce per axis.

        ``sequence_axes`` are those of them on which ranks hold parts of the *same* sequences, as
        many on each: context parallel, and tensor parallel as above. ``sequence_loss`` makes one
        more all-reduce for each of these. `ExpertConfigError` for one that is not among ``axes``,
        and for axes over ranks that hold the same tokens (``replicated_over``).
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
        """Return weights and expert ids, both ``[tokens, top_k]``, for ``x [tokens, dim]``.

        Equal inputs give equal ids, so recomputed activations meet the same experts. For
        ``sequence_loss``, ``sequence_ids [tokens]`` (int64) say which of ``num_sequences`` each
        token is of; without them all are of one. `ExpertConfigError` for an input of another
        shape or no floating dtype, and for sequences that are not those of the tokens; their ids'
        values are looked at on the CPU.
        """
        check_tokens(x, self.dim)
        if sequence_ids is not None:
            check_sequences(sequence_ids, x.shape[0], num_sequences)
        weight = local_weight(self.weight, self.replicated_over)
        # Not more exact than both are: a product of narrow numbers stays a narrow, fast one.
        dtype = torch.promote_types(x.dtype, weight.dtype)
        with without_autocast(x):
            logits = F.linear(x.to(dtype), weight.to(dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.noise and self.training:
            logits = logits + self.noise * torch.randn_like(logits)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        expert_ids = choose_experts(
            scores,
            self.top_k,
            bias=self.bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score_experts=self.group_score_experts,
        )
        weights = scores.gather(1, expert_ids)
        if self.normalise:
            # Sigmoids can all be zero; a softmax's largest never are.
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=_TINY)
        if self.scale != 1:
            weights = weights * self.scale
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
            weights = attach(weights, total, lambda: self.loss_scale, self._add_load, counts)
        return weights, expert_ids

    def _add_load(self, counts: Tensor) -> None:
        """Count the choices of one forward; runs in its backward."""
        load = self.counted_load()
        load += counts

    def counted_load(self) -> Tensor:
        """Return ``load``, with memory where the weight has got some by assignment."""
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
        for axis in self.token_axes or ():
            (totals,) = self.collectives.all_reduce(axis, [totals]).wait()
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
        for axis in self.sequence_axes:
            (counts,) = self.collectives.all_reduce(axis, [counts]).wait()
        total = counts.new_full((1,), num_sequences)
        cut = [axis.ranks for axis in self.sequence_axes]
        for axis in self.token_axes or ():
            if axis.ranks not in cut:  # the others have the same sequences
                (total,) = self.collectives.all_reduce(axis, [total]).wait()
        counts = counts.view(num_sequences, self.num_experts)  # a number of 0 leaves -1 undefined
        return sequence_balancing_share(
            self._shares(scores), sequence_ids, counts, total[0], self.top_k
        )

    def _shares(self, scores: Tensor) -> Tensor:
        """Return scores that sum to one for each token."""
        if self.score == "softmax":
            return scores
        return scores / scores.sum(-1, keepdim=True).clamp(min=_TINY)


def as_axes(axes: AxisMesh | Sequence[Axis]) -> tuple[Axis, ...]:
    """Return ``axes``, or all axes of a mesh; communicates nothing."""
    if isinstance(axes, Sequence):
        if not all(isinstance(axis, Axis) for axis in axes):
            raise ExpertConfigError(f"token axes {axes!r} are not a mesh or a sequence of Axis")
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
