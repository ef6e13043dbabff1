"""State dicts whose experts are in their own order, wherever a placement has put them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._errors import ExpertConfigError
from .._experts import GroupedExperts, order_entry
from .._torch import EXTRA_STATE, name_in_state
from ._plan import Migration, plan_migration
from ._replicas import ReplicaSum, move_rows, own_order, rows_here

Change = Callable[[str, Tensor], Tensor]


def order_by_expert(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with one row per expert, in order, for all experts that have a placement.

    ``state`` is what torch's ``get_model_state_dict`` or ``get_optimizer_state_dict`` gives for
    ``model``, flattened or not; its other entries come as they are, and what says the order of the
    rows is left out, as in checkpoints that others write. What is saved so loads under every split
    and placement, and what others saved loads into it. One all-to-all over the experts' axis for
    each tensor, of the rows that change rank; replicas are one expert, whose first slot gives the
    values.

    `ExpertConfigError`, before any communication, where the ranks do not divide the experts, and
    for tensors that another axis cuts along their experts.
    """
    return _reorder(model, state, to_experts=True)


def order_by_slot(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state``, ordered by expert, with a row for each slot of ``model``'s placements.

    The inverse of `order_by_expert`, for ``set_model_state_dict`` and ``set_optimizer_state_dict``:
    torch's checkpoints load into the entries of a state dict that `order_by_expert` made.
    Communicates and raises as that does.
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
            entries[full] = full.removesuffix(name) + EXTRA_STATE

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
        if name is None or not isinstance(value, DTensor):
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
