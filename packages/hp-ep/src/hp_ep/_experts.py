"""The experts' feed-forward networks: many at once on sorted rows, and the one all tokens share."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dtensor import Axis

from ._errors import ExpertConfigError, RoutingError
from ._parameters import local_weight
from ._sizes import check_sizes
from ._torch import EXTRA_STATE, as_autocast, before_loading, can_group, grouped_linear, is_saved
from .placement._replicas import ReplicaSum, place_rows

Activation = Literal["swiglu", "geglu"]
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu}


class GroupedExperts(nn.Module):
    """``num_experts`` gated feed-forward networks, each applied to its own block of rows.

    Expert ``e`` computes ``w2[e] @ (gate(w1[e] @ x) * (w3[e] @ x))`` (Shazeer, arXiv 2002.05202,
    section 2), with ``gate`` SiLU for ``activation="swiglu"`` and GELU for ``"geglu"``. Parameters:
    ``w1, w3 [num_experts, hidden_dim, dim]`` and ``w2 [num_experts, dim, hidden_dim]``. They may be
    DTensors sharded by expert, as `ExpertParallel` makes them: then the local experts compute.
    `ExpertConfigError` for sizes that are no positive integers.

    The state dict has the parameters alone. With a placement it has one more entry, the expert of
    each row of the weights; loading a state dict that says another order than the layer's is
    refused. One without that entry is in the experts' own order, and its rows go where the
    placement wants them: one all-to-all over the experts' axis for each weight.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: Activation = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes({"dim": dim, "hidden_dim": hidden_dim, "num_experts": num_experts})
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.activation = _known(activation)
        up, down = (num_experts, hidden_dim, dim), (num_experts, dim, hidden_dim)
        self.w1 = nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(down, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(up, device=device, dtype=dtype))
        self.replicas: ReplicaSum | None = None
        before_loading(self, _put_in_order)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, uniform within ``1 / sqrt(in)`` as ``nn.Linear`` does."""
        _draw(self.w1, self.w2, self.w3)

    def extra_repr(self) -> str:
        """Return the sizes and the activation, as ``print`` shows them; experts of all ranks."""
        return (
            f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"activation={self.activation!r}"
        )

    def place(self, replicas: ReplicaSum) -> None:
        """Take the placement of ``replicas``; from now on the state dict says its order."""
        self.replicas = replicas
        kind = type(self)
        # The class, not the module, is what torch asks for an extra state.
        self.__class__ = (
            PlacedExperts
            if kind is GroupedExperts
            else type(f"Placed{kind.__name__}", (PlacedExperts, kind), {})
        )

    def row_order(self) -> list[int]:
        """Return the expert of each row of the weights, of all ranks."""
        own = range(self.num_experts)
        return list(own if self.replicas is None else self.replicas.placement.experts)

    def check_order(self, state: object) -> None:
        """Raise an `ExpertConfigError` unless ``state`` is the order that the weights have here."""
        if not isinstance(state, Tensor) or state.dtype != torch.int64:
            kind = state.dtype if isinstance(state, Tensor) else type(state).__name__
            raise ExpertConfigError(
                f"the order of the experts in the state dict ({EXTRA_STATE}) is {kind}; it must be "
                "torch.int64: leave that entry as it was saved when others are cast or averaged"
            )
        saved, here = state.tolist(), self.row_order()
        if saved != here:
            raise ExpertConfigError(
                f"the saved weights are those of experts {saved}, this layer's of {here}; load "
                "them under the placement they were saved with, or save what order_by_expert gives"
            )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return each row's result ``[rows, dim]``.

        ``rows [rows, dim]`` lie by expert, ``counts [local experts]`` of them for each. Grouped
        products where torch has a kernel for the device, dtype and shapes that leaves the counts
        there, else one expert after the other, which copies the counts to the host, once; both in
        autocast's dtype where that is on.
        `ExpertConfigError` for rows of another width or dtype than the weights'. `RoutingError`
        where ``counts`` on the CPU are negative or do not sum to the rows; on other devices that
        is not looked at.
        """
        weights = tuple(map(local_weight, (self.w1, self.w2, self.w3)))
        shared = weights if self.replicas is None else self.replicas.share(weights)
        # Autocast knows linear products only, not grouped ones.
        rows, w1, w2, w3 = (as_autocast(tensor) for tensor in (rows, *shared))
        if rows.shape[1:] != (self.dim,) or rows.dtype != w1.dtype:
            raise ExpertConfigError(
                f"rows are {rows.dtype} of shape {tuple(rows.shape)}; these experts take "
                f"{w1.dtype} of shape [rows, {self.dim}]"
            )
        if counts.shape != w1.shape[:1]:
            raise ExpertConfigError(
                f"counts {tuple(counts.shape)} must have one number per expert here: "
                f"({w1.shape[0]},)"
            )
        if counts.is_cpu:
            _check_split(counts, rows)
        gate = _GATES[self.activation]
        if rows.shape[0] and can_group(rows, w1, w2, w3):
            ends = counts.cumsum(0, dtype=torch.int32)
            hidden = gate(grouped_linear(rows, w1, ends)) * grouped_linear(rows, w3, ends)
            return grouped_linear(hidden, w2, ends)
        # Kernels need not write what is a sum of no rows: gradients of weights, for one.
        sizes = counts.tolist() if rows.shape[0] else [0] * w1.shape[0]
        # unbind has one backward for all experts; indexing w[i] would fill a whole w per expert.
        each = zip(rows.split(sizes), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
        return torch.cat([_gated(gate, x, up, down, side) for x, up, down, side in each])


class PlacedExperts(GroupedExperts):
    """Experts with a placement, whose state dict says which expert each row is."""

    def get_extra_state(self) -> Tensor:
        """Return the expert of each row of the weights ``[rows]``, of all ranks."""
        return order_entry(self.row_order())

    def set_extra_state(self, state: Any) -> None:
        """Raise an `ExpertConfigError` unless ``state`` is the order that the weights have here."""
        self.check_order(state)


class SharedExperts(nn.Module):
    """One gated feed-forward network for every token; ``hidden_dim`` is that of all of them.

    Parameters as in `GroupedExperts`, without the experts' dimension. `MoE` makes it. A style sets
    ``replicated_over`` to the axis whose ranks hold the same tokens.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "swiglu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = _known(activation)
        self.w1 = nn.Parameter(torch.empty(hidden_dim, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(dim, hidden_dim, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(hidden_dim, dim, device=device, dtype=dtype))
        self.replicated_over: Axis | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, uniform within ``1 / sqrt(in)`` as ``nn.Linear`` does."""
        _draw(self.w1, self.w2, self.w3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for each of ``x [tokens, dim]``."""
        w1, w2, w3 = (local_weight(w, self.replicated_over) for w in (self.w1, self.w2, self.w3))
        return _gated(_GATES[self.activation], x, w1, w2, w3)


def _gated(
    gate: Callable[[Tensor], Tensor], x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor
) -> Tensor:
    return F.linear(gate(F.linear(x, w1)) * F.linear(x, w3), w2)


def order_entry(experts: Iterable[int]) -> Tensor:
    """Return the expert of each row of the weights, as a state dict has it."""
    return torch.tensor(list(experts), dtype=torch.int64, device="cpu")


def _put_in_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Give ``module``, a `GroupedExperts`, rows in its own order; raise if they lie in another."""
    if not isinstance(module, GroupedExperts):
        return
    key, replicas = prefix + EXTRA_STATE, module.replicas
    if key in state_dict and is_saved(state_dict[key]):
        module.check_order(state_dict[key])
        if replicas is None:  # saved when all layers had one; torch would not expect it
            del state_dict[key]
    elif replicas is not None and prefix + "w1" in state_dict:
        names = [prefix + name for name, _ in module.named_parameters(recurse=False)]
        given = {name: state_dict[name] for name in names if name in state_dict}
        state_dict |= place_rows(given, replicas)
        state_dict[key] = order_entry(module.row_order())


def _draw(*weights: Tensor) -> None:
    for weight in weights:
        bound = 1.0 / math.sqrt(weight.shape[-1])
        nn.init.uniform_(weight, -bound, bound)


def _known(activation: Activation) -> Activation:
    if activation not in _GATES:
        raise ExpertConfigError(f"activation={activation!r} is not one of {sorted(_GATES)}")
    return activation


def _check_split(counts: Tensor, rows: Tensor) -> None:
    numbers = counts.tolist()
    if min(numbers) < 0 or sum(numbers) != rows.shape[0]:
        raise RoutingError(
            f"counts {numbers} must be at least 0 and sum to the {rows.shape[0]} rows"
        )
