"""The experts' feed-forward networks: many at once on sorted rows, and the one all tokens share."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dtensor import Axis, mark_repeated_rows
from hp_dtensor.torch_compat import EXTRA_STATE_KEY, backward_keeps_graph

from ._errors import ExpertConfigError, RoutingError
from ._parameters import local_weight
from ._permutation import pad_blocks, place_rows, row_parts, row_products, take_rows
from ._products import (
    Blocks,
    blocks_of,
    gather_bias,
    grouped_linear,
    outer_products,
    products,
)
from ._sizes import check_factors, check_sizes
from ._torch import as_autocast, before_loading, first_order, is_saved, run_function
from .placement._replicas import ReplicaSum
from .placement._replicas import place_rows as place_experts

Gate = Callable[[Tensor, Tensor], Tensor]
"""Returns the hidden numbers of ``gate`` and ``up``, each ``[rows, hidden_dim]``."""
FusedGate = Callable[[Tensor], Tensor]
"""Returns the hidden numbers ``[rows, hidden_dim]`` of what the first product gives."""
Activation = Literal["swiglu", "geglu", "clamped_swiglu"] | Gate

_GATES: dict[str, Gate] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
}


class GroupedExperts(nn.Module):
    """``num_experts`` gated feed-forward networks, the experts of a mixture-of-experts layer.

    The input has one row for each pair of a token and an expert that the token chose. Rows are
    sorted by expert, and each expert computes its own rows. For a row ``x``, expert ``e`` computes
    ``down[e] @ (act(gate[e] @ x) * (up[e] @ x))`` (Shazeer, arXiv 2002.05202, section 2). If a
    style such as `ExpertParallel` has split the experts over ranks, each rank computes its local
    experts.

    | parameter | shape |
    |---|---|
    | ``gate_up_proj`` | ``[num_experts, 2, hidden_dim, dim]``: gate at 0, up at 1 |
    | ``down_proj`` | ``[num_experts, dim, hidden_dim]`` |
    | ``gate_up_proj_bias``, with ``bias`` | ``[num_experts, 2, hidden_dim]`` |
    | ``down_proj_bias``, with ``bias`` | ``[num_experts, dim]`` |

    State dicts in two other formats load too: ``gate_up_proj`` of transformers with
    ``[num_experts, 2 * hidden_dim, dim]``, and separate weights ``w1``, ``w3``, ``w2`` (gate, up,
    down).

    With a `Placement`, the weights have one entry along dim 0 per slot, and the state dict has one
    more tensor: the expert of each of these entries. Loading a state dict with another order raises
    `ExpertConfigError`. A state dict without this tensor is loaded as one entry per expert, in the
    order of the experts; one all-to-all per weight moves its entries to the slots.

    Args:
        dim: Length of a row.
        hidden_dim: Output size of the gate and of the up projection of each expert.
        num_experts: Number of experts of all ranks.
        activation: Function of the gate and up projections. Defaults to ``"swiglu"``.

            - ``"swiglu"``: SiLU of the gate times up;
            - ``"geglu"``: GELU of the gate times up;
            - ``"clamped_swiglu"``: ``(up + 1) * gate * sigmoid(swiglu_alpha * gate)``, with
              ``gate`` at most ``swiglu_limit`` and ``up`` between ``-swiglu_limit`` and
              ``swiglu_limit`` (gpt-oss);
            - a function of ``gate`` and ``up`` that computes row by row and has no parameters.
        swiglu_alpha: Factor in ``"clamped_swiglu"``. Defaults to 1.702.
        swiglu_limit: Limit in ``"clamped_swiglu"``. Defaults to 7.0.
        bias: If True, the gate, up and down projections have biases. Defaults to False.
        score_before_experts: If True, rows are multiplied by their routing weights before the
            experts. If False, they are multiplied inside the experts. Defaults to False.
        row_multiple: Rows of each expert are padded with zeros to a multiple of this number,
            for low-precision kernels: 16 for float8; 8, 32 or 128 for others. Defaults to 1.
        float8: If True, matrix products use inputs and weights rounded to float8 (e4m3), with one
            scale per row of the inputs and per row of the weights. The product for the gradients of
            inputs uses rounded gradients. Parameters, results and gradients of weights keep their
            dtype. Defaults to False.
        device: Device of the parameters. Defaults to the default device.
        dtype: Dtype of the parameters. Defaults to the default dtype.

    Raises:
        ExpertConfigError: A size is not a positive int, a factor is negative, or ``activation`` is
            unknown.

    Examples:
        >>> experts = GroupedExperts(dim=64, hidden_dim=128, num_experts=4)
        >>> rows = torch.randn(10, 64)  # sorted by expert
        >>> counts = torch.tensor([3, 0, 5, 2])  # rows of each expert
        >>> experts(rows, counts).shape
        torch.Size([10, 64])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: Activation = "swiglu",
        swiglu_alpha: float = 1.702,
        swiglu_limit: float = 7.0,
        bias: bool = False,
        score_before_experts: bool = False,
        row_multiple: int = 1,
        float8: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(
            {
                "dim": dim,
                "hidden_dim": hidden_dim,
                "num_experts": num_experts,
                "row_multiple": row_multiple,
            }
        )
        check_factors({"swiglu_alpha": swiglu_alpha, "swiglu_limit": swiglu_limit})
        self.dim = dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.activation = activation
        self.swiglu_alpha = float(swiglu_alpha)
        self.swiglu_limit = float(swiglu_limit)
        self.score_before_experts = score_before_experts
        self.row_multiple = row_multiple
        self.float8 = float8
        gate_of(activation)  # raises for one that is unknown

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(2, hidden_dim, dim)
        self.down_proj = parameter(dim, hidden_dim)
        self.gate_up_proj_bias = parameter(2, hidden_dim) if bias else None
        self.down_proj_bias = parameter(dim) if bias else None
        self.replicas: ReplicaSum | None = None
        self.summed_over: Axis | None = None
        before_loading(self, _put_in_order)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize all parameters uniformly within ``1 / sqrt(input size)``, as ``nn.Linear``."""
        _draw(self.gate_up_proj, self.gate_up_proj_bias)
        _draw(self.down_proj, self.down_proj_bias)

    def extra_repr(self) -> str:
        """Return the sizes and the options for ``print``.

        Returns:
            The sizes, the activation, and the options that differ from their defaults.
        """
        text = (
            f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"activation={self.activation!r}"
        )
        options: dict[str, tuple[object, object]] = {
            "bias": (self.down_proj_bias is not None, False),
            "score_before_experts": (self.score_before_experts, False),
            "row_multiple": (self.row_multiple, 1),
            "float8": (self.float8, False),
        }
        said = [f"{k}={value!r}" for k, (value, default) in options.items() if value != default]
        return ", ".join([text, *said])

    def place(self, replicas: ReplicaSum) -> None:
        """Set the placement of the experts. Styles and `migrate_experts` call this method.

        The state dict then also has the expert of each entry of the weights along dim 0. Each
        parameter gets a mark for its replicas; see `mark_replicas`.

        Args:
            replicas: Object with the placement, which also sums the gradients of replicas.
        """
        self.replicas = replicas
        kind = type(self)
        # The class, not the module, is what torch asks for an extra state.
        if kind is GroupedExperts:
            self.__class__ = PlacedExperts
        elif not issubclass(kind, PlacedExperts):
            self.__class__ = type(f"Placed{kind.__name__}", (PlacedExperts, kind), {})
        self.mark_replicas()

    def mark_replicas(self) -> None:
        """Mark replicas of experts in each parameter, so that norms count each expert once."""
        if self.replicas is not None:
            for parameter in self.parameters(recurse=False):
                mark_repeated_rows(parameter, self.replicas.repeated)

    def row_order(self) -> list[int]:
        """Return the expert of each entry of the weights along dim 0.

        Returns:
            One expert id per entry, for the weights of all ranks.
        """
        own = range(self.num_experts)
        return list(own if self.replicas is None else self.replicas.placement.experts)

    def check_order(self, state: object) -> None:
        """Check that saved weights have the same order of experts as this module.

        Args:
            state: Tensor from a state dict: an int64 tensor with the expert of each entry of the
                weights along dim 0.

        Raises:
            ExpertConfigError: ``state`` is not an int64 tensor, or has another order.
        """
        if not isinstance(state, Tensor) or state.dtype != torch.int64:
            kind = state.dtype if isinstance(state, Tensor) else type(state).__name__
            raise ExpertConfigError(
                f"the order of the experts in the state dict ({EXTRA_STATE_KEY}) is {kind}; it "
                "must be torch.int64: leave that entry as it was saved when others are cast or "
                "averaged"
            )
        saved, here = state.tolist(), self.row_order()
        if saved != here:
            raise ExpertConfigError(
                f"the saved weights are those of experts {saved}, this layer's of {here}; load "
                "them under the placement they were saved with, or save what order_by_expert gives"
            )

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """Apply the local experts to their rows.

        All experts run in one grouped matrix product if torch has a kernel for the device, dtype
        and shapes. Otherwise experts run one after the other, and ``counts`` is copied to the host
        once. Under autocast, both ways compute in the dtype of autocast.

        Args:
            rows: Rows ``[rows, dim]``, sorted by expert.
            counts: Number of rows of each local expert, ``[local experts]``.
            weights: Routing weight of each row, ``[rows]``. Defaults to None: results are not
                weighted here, because ``combine`` of the dispatcher does it.

        Returns:
            Results ``[rows, dim]``, multiplied by ``weights`` if given.

        Raises:
            ExpertConfigError: ``rows`` is not ``[rows, dim]`` in the dtype of the parameters, or
                ``counts`` or ``weights`` has a wrong shape. Raised on this rank only.
            RoutingError: ``counts`` has negative numbers or does not sum to the number of rows.
                Checked on the CPU outside compiled graphs only.
        """
        given = (self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)
        parts = tuple(local_weight(p, self.summed_over) for p in given if p is not None)
        shared = parts if self.replicas is None else self.replicas.share(parts)
        # Autocast knows linear products only, not grouped ones.
        rows, both, down, *biases = (as_autocast(tensor) for tensor in (rows, *shared))
        gate_up = both.flatten(1, 2)  # a view: one product for both
        self._check(rows, counts, weights, gate_up)
        places = None
        if self.row_multiple > 1:
            places, counts, size = pad_blocks(counts, rows.shape[0], self.row_multiple)
            rows = place_rows(rows, places, size)
            weights = None if weights is None else place_rows(weights[:, None], places, size)[:, 0]
        blocks = blocks_of(counts, rows, (gate_up, down), float8=self.float8)
        inside = weights
        if self.score_before_experts and weights is not None:
            rows, inside = weigh_rows(rows, weights), None
        if biases:
            bias = biases[1]
            if self.summed_over is not None and self.summed_over.index:
                bias = bias - bias.detach()  # added on the first rank; its gradient is on all
            biases = [biases[0].flatten(1), bias]
        # Not kept on the module: a function without a name could not be pickled.
        gate = _of_halves(gate_of(self.activation, self.swiglu_alpha, self.swiglu_limit))
        result = feed_forward(rows, inside, blocks, gate, gate_up, down, biases)
        return result if places is None else take_rows(result, places)

    def _check(self, rows: Tensor, counts: Tensor, weights: Tensor | None, local: Tensor) -> None:
        if rows.shape[1:] != (self.dim,) or rows.dtype != local.dtype:
            raise ExpertConfigError(
                f"rows are {rows.dtype} of shape {tuple(rows.shape)}; these experts take "
                f"{local.dtype} of shape [rows, {self.dim}]"
            )
        if counts.shape != local.shape[:1]:
            raise ExpertConfigError(
                f"counts {tuple(counts.shape)} must have one number per expert here: "
                f"({local.shape[0]},)"
            )
        if weights is not None and weights.shape != rows.shape[:1]:
            raise ExpertConfigError(
                f"weights {tuple(weights.shape)} must have one number per row: ({rows.shape[0]},)"
            )
        if counts.is_cpu and not torch.compiler.is_compiling():
            _check_split(counts, rows)


class PlacedExperts(GroupedExperts):
    """Experts with a placement: the state dict says which expert each row is.

    Parameters say which of their rows are replicas, also those that FSDP, a loader or a copy puts
    in the place of others.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # FSDP sets its parameters by this method where a class has one of its own.
        if isinstance(value, nn.Parameter) and self.replicas is not None:
            mark_repeated_rows(value, self.replicas.repeated)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_replicas()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_replicas()
        return self

    def get_extra_state(self) -> Tensor:
        """Return the expert of each row of the weights ``[rows]``, of all ranks."""
        return order_entry(self.row_order())

    def set_extra_state(self, state: Any) -> None:
        """Raise an `ExpertConfigError` unless ``state`` is the order that the weights have here."""
        self.check_order(state)


class SharedExperts(nn.Module):
    """One gated feed-forward network for every token; ``hidden_dim`` is that of all of them.

    Parameters ``gate_up_proj [2 * hidden_dim, dim]``, the rows of ``gate`` before those of ``up``,
    and ``down_proj [dim, hidden_dim]``. `MoE` makes it. With ``gated`` the result is multiplied by
    ``sigmoid(x @ gate.T)``, with a parameter ``gate [1, dim]`` (Qwen's ``shared_expert_gate``). A
    style sets ``replicated_over`` to the axis whose ranks hold the same tokens.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "swiglu",
        swiglu_alpha: float = 1.702,
        swiglu_limit: float = 7.0,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        gate_of(activation)  # raises for one that is unknown
        self.activation = activation
        self.swiglu_alpha, self.swiglu_limit = swiglu_alpha, swiglu_limit

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(2 * hidden_dim, dim)
        self.down_proj = parameter(dim, hidden_dim)
        self.gate = parameter(1, dim) if gated else None
        self.replicated_over: Axis | None = None
        before_loading(self, _join_rows)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, uniform within ``1 / sqrt(in)`` as ``nn.Linear`` does."""
        for weight in (self.gate_up_proj, self.down_proj, self.gate):
            if weight is not None:
                _draw(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for each of ``x [tokens, dim]``."""
        gate_up, down = (
            local_weight(w, self.replicated_over) for w in (self.gate_up_proj, self.down_proj)
        )
        hidden, down = F.linear(x, gate_up), as_autocast(down)
        gate = _of_halves(gate_of(self.activation, self.swiglu_alpha, self.swiglu_limit))
        result = _down_product(gate, hidden, None, down[None], None)
        if self.gate is None:
            return result
        return F.linear(x, local_weight(self.gate, self.replicated_over)).sigmoid() * result


def gate_of(activation: Activation, alpha: float = 1.702, limit: float = 7.0) -> Gate:
    """Return the function of ``gate`` and ``up`` that ``activation`` names, or is."""
    if activation == "clamped_swiglu":

        def clamped(gate: Tensor, up: Tensor) -> Tensor:
            gate = gate.clamp(max=limit)
            return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)

        return clamped
    if isinstance(activation, str) and activation in _GATES:
        return _GATES[activation]
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise ExpertConfigError(
            f"activation={activation!r} has parameters, which would get no gradient; give a "
            "function without"
        )
    if isinstance(activation, str) or not callable(activation):
        known = sorted([*_GATES, "clamped_swiglu"])
        raise ExpertConfigError(
            f"activation={activation!r} is not one of {known} or a function of gate and up"
        )
    return activation


def _of_halves(gate: Gate) -> FusedGate:
    return lambda gate_up: gate(*gate_up.chunk(2, -1))


def feed_forward(
    rows: Tensor,
    weights: Tensor | None,
    blocks: Blocks,
    gate: FusedGate,
    gate_up: Tensor,
    down: Tensor,
    biases: Sequence[Tensor],
) -> Tensor:
    """Return what each row's expert makes of it, times the row's weight: ``[rows, dim]``.

    The weight multiplies what the down product takes, and the bias of the result.

    Args:
        rows: ``[rows, dim]``, by expert.
        weights: Routing weight of each row ``[rows]``; None for none.
        blocks: How many rows each expert has.
        gate: Makes ``[rows, hidden]`` of the first product.
        gate_up: ``[experts, 2 * hidden, dim]``, in the order that ``gate`` wants.
        down: ``[experts, dim, hidden]``.
        biases: None, or those of both products: ``[experts, 2 * hidden]``, ``[experts, dim]``.
    """
    hidden = grouped_linear(rows, gate_up, blocks)
    if biases:
        hidden = hidden + gather_bias(biases[0], blocks, hidden.shape[0])
    result = _down_product(gate, hidden, weights, down, blocks)
    if not biases:
        return result
    return result + _weighted(gather_bias(biases[1], blocks, result.shape[0]), weights)


def weigh_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return ``rows [rows, dim]`` times their ``weights [rows]``, rounded to the rows' dtype.

    The gradient of a weight is summed in float32 at least.
    """
    if torch.compiler.is_compiling():
        return _weighted(rows, weights)
    return run_function(_WeighRows, rows, weights)


def _down_product(
    gate: FusedGate, gate_up: Tensor, weights: Tensor | None, down: Tensor, blocks: Blocks | None
) -> Tensor:
    """Return the product of ``down`` with the hidden numbers, times ``weights [rows]`` if given.

    Of these ``gate_up [rows, 2 * hidden]`` alone is kept for backward, which computes them again.
    ``blocks`` are None for one expert.
    """
    if torch.compiler.is_compiling():  # the compiler recomputes what costs less than keeping it
        hidden = _weighted(gate(gate_up), weights)
        return F.linear(hidden, down[0]) if blocks is None else grouped_linear(hidden, down, blocks)
    if blocks is None:
        rows = gate_up.shape[0]
        blocks = Blocks(counts=torch.tensor([rows], device="cpu"), sizes=(rows,))
    return run_function(_DownProduct, gate, gate_up, weights, down, blocks)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return rows
    wide = torch.promote_types(rows.dtype, weights.dtype)
    return (rows.to(wide) * weights.to(rows.dtype).to(wide)[:, None]).to(rows.dtype)


class _WeighRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return rows * weights.to(rows.dtype)[:, None]

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        products = None if rows is None else row_products(rows, grads[0]).to(weights.dtype)
        return grads[0] * weights.to(grads[0].dtype)[:, None], products


class _DownProduct(torch.autograd.Function):
    """The gate and the down product together, so that what is between them need not be kept.

    Rows are computed in parts, since a gate makes several temporaries of the size of its input.
    Backward writes gradients to memory that nobody needs any more: those of ``gate_up`` in its
    place, where the graph is not kept for another backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate: FusedGate,
        gate_up: Tensor,
        weights: Tensor | None,
        down: Tensor,
        blocks: Blocks,
    ) -> Tensor:
        ctx.gate, ctx.sizes, ctx.float8 = gate, blocks.sizes, blocks.float8
        ctx.save_for_backward(gate_up, weights, down, blocks.counts)
        hidden = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        for part in row_parts(gate_up):
            found = gate(gate_up[part])
            scale = 1 if weights is None else weights[part].to(found.dtype)[:, None]
            torch.mul(found, scale, out=hidden[part])
        return products(hidden, down, blocks)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights, down, counts = ctx.saved_tensors
        blocks = Blocks(counts=counts, sizes=ctx.sizes, float8=ctx.float8)
        _, gate_up_needs, weights_need, down_needs, _ = ctx.needs_input_grad
        # The gradient of the hidden numbers; where that was used, the numbers take its place.
        hidden = products(grads[0], down.transpose(1, 2), blocks)
        found = torch.empty_like(gate_up) if backward_keeps_graph() else gate_up
        inner = []
        for part in row_parts(gate_up):
            grad = hidden[part]
            scale = 1 if weights is None else weights[part].to(grad.dtype)[:, None]
            with torch.enable_grad():
                leaf = gate_up[part].detach().requires_grad_(gate_up_needs)
                numbers = ctx.gate(leaf)
            if weights_need:
                inner.append(row_products(numbers.detach(), grad))
            leaf_grad = None
            if gate_up_needs:
                (leaf_grad,) = torch.autograd.grad(numbers, leaf, grad * scale)
            torch.mul(numbers.detach(), scale, out=grad)
            if leaf_grad is not None:
                found[part] = leaf_grad
        return (
            None,
            found if gate_up_needs else None,
            torch.cat(inner).to(weights.dtype) if weights_need else None,
            outer_products(grads[0], hidden, blocks) if down_needs else None,
            None,
        )


def order_entry(experts: Iterable[int]) -> Tensor:
    """Return the expert of each row of the weights, as a state dict has it."""
    return torch.tensor(list(experts), dtype=torch.int64, device="cpu")


def _put_in_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Give ``module``, a `GroupedExperts`, rows in its own order; raise if they lie in another."""
    if not isinstance(module, GroupedExperts):
        return
    _rename_old(state_dict, prefix, lambda gate, up: torch.stack([gate, up], 1))
    for name in (prefix + "gate_up_proj", prefix + "gate_up_proj_bias"):
        value, dims = state_dict.get(name), 2 if name.endswith("bias") else 3
        if isinstance(value, Tensor) and value.dim() == dims and value.shape[1] % 2 == 0:
            state_dict[name] = value.unflatten(1, (2, -1))  # the rows of gate, then those of up
    key, replicas = prefix + EXTRA_STATE_KEY, module.replicas
    if key in state_dict and is_saved(state_dict[key]):
        module.check_order(state_dict[key])
        if replicas is None:  # saved when all layers had one; torch would not expect it
            del state_dict[key]
    elif replicas is not None:
        names = [prefix + name for name, _ in module.named_parameters(recurse=False)]
        given = {name: state_dict[name] for name in names if name in state_dict}
        if given:
            state_dict |= place_experts(given, replicas)
            state_dict[key] = order_entry(module.row_order())


def _join_rows(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: object) -> None:
    """Make ``w1, w3, w2`` of a state dict the weights of a `SharedExperts`."""
    _rename_old(state_dict, prefix, lambda gate, up: torch.cat([gate, up]))


def _rename_old(
    state_dict: dict[str, Any], prefix: str, join: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Rename ``w1, w3, w2`` of a state dict of version 0.1; ``join`` makes one of gate and up."""
    names = [prefix + name for name in ("w1", "w3", "w2")]
    if not all(name in state_dict for name in names):
        return
    gate, up, down = (state_dict.pop(name) for name in names)
    state_dict[prefix + "gate_up_proj"] = join(gate, up)
    state_dict[prefix + "down_proj"] = down


def _draw(weight: Tensor, bias: Tensor | None = None) -> None:
    bound = 1.0 / math.sqrt(weight.shape[-1])
    for each in (weight, bias):
        if each is not None:
            nn.init.uniform_(each, -bound, bound)


def _check_split(counts: Tensor, rows: Tensor) -> None:
    numbers = counts.tolist()
    if min(numbers) < 0 or sum(numbers) != rows.shape[0]:
        raise RoutingError(
            f"counts {numbers} must be at least 0 and sum to the {rows.shape[0]} rows"
        )
