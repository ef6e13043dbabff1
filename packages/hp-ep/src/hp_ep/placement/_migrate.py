"""Experts move to where a placement wants them: with an optimizer, and in state dicts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hp_dtensor import Axis
from hp_dtensor.torch_compat import EXTRA_STATE_KEY

from .._errors import ExpertConfigError
from .._experts import GroupedExperts, order_entry
from .._moe import MoE
from .._torch import name_in_state
from ..dispatch._interface import TokenDispatcher
from ..dispatch._wrappers import Placed, Summed
from ._plan import Migration, Placement, plan_migration
from ._replicas import (
    ReplicaSum,
    check_same_placement,
    exchange_rows,
    move_rows,
    own_order,
    rows_here,
)

Change = Callable[[str, Tensor], Tensor]


@torch.no_grad()
def migrate_experts(
    layer: MoE, placement: Placement, optimizer: Optimizer | None = None
) -> Migration:
    """Move the experts of a layer to a new placement, in place.

    Call this function between optimizer steps, on all ranks, with the same placement. A `Placement`
    has slots, and each slot of a rank holds one expert. Parameters, gradients and optimizer state
    of the experts have one entry along dim 0 per slot. They stay the same tensor objects and get
    the values of the new experts. Training continues with the same results. Copies of the layer,
    for example averaged weights, are not moved; migrate them in the same step.

    Ranks first check that the placement and the tensors to move are the same on all of them, with
    one small all-gather per axis of the experts' mesh. Then one all-to-all per tensor moves the
    entries that change rank.

    Args:
        layer: A `MoE` to which a style with a ``placement`` was applied.
        placement: The new placement, with the same number of slots.
        optimizer: The optimizer that trains the experts. Defaults to None: no optimizer state.

    Returns:
        The migration that was executed, as `plan_migration` returns it.

    Raises:
        ExpertConfigError: ``layer`` has no placement; ranks have different placements, gradients or
            optimizer states; the new placement has another number of slots; ``optimizer`` does not
            train the experts; or a mesh axis that does not split the experts shards dim 0 of a
            tensor. All ranks raise together before anything moves.

    Examples:
        On 4 ranks:

        >>> mesh, layer = init_device_mesh("cpu", (4,)), MoE(64, 128, num_experts=8, top_k=2)
        >>> style = ExpertParallel(token_axes=mesh, placement=Placement.contiguous(8, 4))
        >>> names = parallelize_experts(layer, mesh, style)
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> layer(torch.randn(16, 64)).sum().backward()
        >>> load = collect_loads(layer)["router"]
        >>> migration = migrate_experts(layer, plan_placement(load, num_ranks=4), optimizer)
    """
    if not isinstance(layer, MoE):
        raise ExpertConfigError(f"got a {type(layer).__name__}; experts move with their whole MoE")
    replicas = layer.experts.replicas
    if replicas is None:
        raise ExpertConfigError(
            "the experts have no placement; give the style one, Placement.contiguous(...) if "
            "nothing is known of the load yet"
        )
    tensors: dict[str, Tensor] = {}
    fault = None
    try:
        tensors = _tensors(layer.experts, optimizer, replicas)
    except ExpertConfigError as error:  # told to all ranks first, which may see no fault
        fault = error
    said = str(fault or {what: tuple(tensor.shape) for what, tensor in tensors.items()})
    _compare(layer.experts, placement, replicas, said)
    if fault is not None:
        raise fault
    if not isinstance(placement, Placement):  # on all ranks, or they would have differed
        raise ExpertConfigError(
            f"placement={placement!r} is not a Placement; make one by plan_placement"
        )
    migration = plan_migration(replicas.placement, placement)
    dispatcher = _moved(layer.dispatcher, placement)
    for tensor in tensors.values():
        tensor.copy_(exchange_rows(tensor, migration, replicas.axis, replicas.collectives))
    layer.dispatcher = dispatcher
    layer.experts.place(replicas.moved_to(placement))
    return migration


def _compare(
    experts: GroupedExperts, placement: object, replicas: ReplicaSum, tensors: str
) -> None:
    """Raise on all ranks that have a part of the experts unless all give the same."""
    mesh = experts.gate_up_proj.device_mesh if isinstance(experts.gate_up_proj, DTensor) else None
    axes = [replicas.axis] if mesh is None else [Axis.of(mesh, i) for i in range(mesh.ndim)]
    device = experts.gate_up_proj.device
    check_same_placement(placement, axes, device, replicas.collectives, tensors)


def _moved(dispatcher: TokenDispatcher, placement: Placement) -> TokenDispatcher:
    if isinstance(dispatcher, Placed):
        return dispatcher.moved_to(placement)
    if isinstance(dispatcher, Summed):
        return dispatcher.around(_moved(dispatcher.inner, placement))
    raise ExpertConfigError(
        f"the layer's dispatcher, a {type(dispatcher).__name__}, knows no placement; leave the one "
        "that the style gave"
    )


def _tensors(
    experts: GroupedExperts, optimizer: Optimizer | None, replicas: ReplicaSum
) -> dict[str, Tensor]:
    """Return the local part of everything that has a row per slot, checked, in one order."""
    found: dict[str, Tensor] = {}
    num_slots = len(replicas.placement.experts)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else ()
    for name, parameter in experts.named_parameters(recurse=False):
        state = {}
        if optimizer is not None:
            if parameter.requires_grad and id(parameter) not in held:
                raise ExpertConfigError(
                    f"the optimizer has no {name} of these experts, whose state would stay where "
                    "it is; give the one that trains them"
                )
            state = optimizer.state.get(parameter, {})
        several = {name: parameter, f"gradient of {name}": parameter.grad}
        several |= {f"{key} of {name}": value for key, value in sorted(state.items())}
        for what, tensor in several.items():
            if isinstance(tensor, Tensor) and tensor.dim():
                found[what] = rows_here(what, tensor, num_slots, replicas.axis)
    return found


def order_by_expert(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose expert weights are in the order of the experts, for saving.

    With a `Placement`, expert weights have one entry along dim 0 per slot, in the order of the
    slots. In the result they have one entry per expert, so that a checkpoint can be loaded with any
    number of ranks and any placement. If an expert has replicas, the values of its first slot are
    taken. Tensors of other modules are unchanged. The tensor with the order of the slots is left
    out. Communicates one all-to-all per tensor, which moves the entries that change rank.

    Args:
        model: The model.
        state: Result of torch's ``get_model_state_dict`` or ``get_optimizer_state_dict`` for
            ``model``, flattened or not.

    Returns:
        A new state dict.

    Raises:
        ExpertConfigError: The number of experts is not divisible by the number of ranks, or a mesh
            axis that does not split the experts shards dim 0 of a tensor. All ranks raise together
            before communication.

    Examples:
        On 4 ranks:

        >>> import torch.distributed.checkpoint as dcp
        >>> mesh, layer = init_device_mesh("cpu", (4,)), MoE(64, 128, num_experts=8, top_k=2)
        >>> style = ExpertParallel(token_axes=mesh, placement=Placement.contiguous(8, 4))
        >>> names = parallelize_experts(layer, mesh, style)
        >>> state = order_by_expert(layer, layer.state_dict())
        >>> metadata = dcp.save(state, checkpoint_id=folder)
    """
    return _reorder(model, state, to_experts=True)


def order_by_slot(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose expert weights are in the order of the model's slots, for loading.

    This is the inverse of `order_by_expert`: expert weights with one entry along dim 0 per expert
    become weights with one entry per slot of the model's placements. Replicas get the same values.
    Communicates one all-to-all per tensor, which moves the entries that change rank.

    Args:
        model: The model.
        state: State dict in the order of the experts, for example from `order_by_expert` with the
            values of a loaded checkpoint.

    Returns:
        A new state dict for torch's ``set_model_state_dict`` or ``set_optimizer_state_dict``.

    Raises:
        ExpertConfigError: `order_by_expert` would raise the error, or ``state`` has the order of
            slots instead of experts. All ranks raise together before communication.

    Examples:
        On 4 ranks:

        >>> mesh, layer = init_device_mesh("cpu", (4,)), MoE(64, 128, num_experts=8, top_k=2)
        >>> style = ExpertParallel(token_axes=mesh, placement=Placement.contiguous(8, 4))
        >>> names = parallelize_experts(layer, mesh, style)
        >>> state = order_by_expert(layer, layer.state_dict())  # dcp.load reads into these tensors
        >>> layer.load_state_dict(order_by_slot(layer, state))
        <All keys matched successfully>
    """
    return _reorder(model, state, to_experts=False)


@torch.no_grad()
def _reorder(model: nn.Module, state: Mapping[str, Any], *, to_experts: bool) -> dict[str, Any]:
    moves: dict[str, tuple[Migration, ReplicaSum]] = {}
    entries: dict[str, str] = {}
    for layer, experts in model.named_modules():
        if not isinstance(experts, GroupedExperts) or experts.replicas is None:
            continue
        placed = experts.replicas.placement
        home = own_order(layer, placed)
        migration = plan_migration(placed, home) if to_experts else plan_migration(home, placed)
        for name, _ in experts.named_parameters(recurse=False):
            full = name_in_state(model, f"{layer}.{name}" if layer else name)
            moves[full] = migration, experts.replicas
            entries[full] = full.removesuffix(name) + EXTRA_STATE_KEY

    def find(path: str) -> str | None:
        """Return the parameter that an entry belongs to, itself or by its optimizer."""
        each = (path, path.removeprefix("state."))
        return next((n for n in moves for p in each if p == n or p.startswith(n + ".")), None)

    def check(path: str, value: Tensor) -> Tensor:
        if path in entries.values() and not to_experts and value.tolist() != sorted(value.tolist()):
            raise ExpertConfigError(
                f"{path} says that the rows are experts {value.tolist()}; give a state in the "
                "order of the experts, as order_by_expert makes it"
            )
        name = find(path)
        if name is not None and value.dim():
            migration, replicas = moves[name]
            rows_here(path, value, len(migration.old.experts), replicas.axis)
        return value

    def change(path: str, value: Tensor) -> Tensor:
        name = find(path)
        if name is None or not isinstance(value, DTensor) or not value.dim():
            return value
        return move_rows(value, *moves[name])

    _map(state, "", check)
    result: dict[str, Any] = _map(state, "", change)
    for name, entry in entries.items():
        result.pop(entry, None)
        if name in result and not to_experts:
            result[entry] = order_entry(moves[name][0].new.experts)
    return result


def _map(value: Any, path: str, change: Change) -> Any:
    """Return ``value`` with every tensor in it, at whatever depth of mappings, changed."""
    if isinstance(value, Mapping):
        return {k: _map(v, f"{path}.{k}" if path else str(k), change) for k, v in value.items()}
    return change(path, value) if isinstance(value, Tensor) else value
