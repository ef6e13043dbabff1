"""An optimizer that steps on flat shards and keeps the state of each parameter."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor

from ._errors import ModuleError, ShardingError
from ._group import ParameterGroup
from ._segments import Piece, Segment, segments_of
from ._unit import Unit, unit_of

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


def sharded_optimizer(
    cls: type[torch.optim.Optimizer], module: nn.Module, **kwargs: Any
) -> "FlatOptimizer":
    """Return an optimizer of a sharded module that updates each flat shard as one tensor.

    ``cls`` is one of torch's optimizers that update every element alone, made with ``kwargs``;
    results are those of ``cls`` on the parameters one by one. The parameter groups, the state and
    its ``state_dict`` are per parameter, as torch's. A parameter without gradient is skipped, and
    from then on updated apart from its neighbours; those that ``add_param_group`` adds are stepped
    one by one. Communicates nothing.

    Raises `ModuleError` for a module that has nothing sharded to train, `ShardingError` for an
    optimizer of another kind.
    """
    if cls not in ELEMENTWISE:
        raise ShardingError(
            f"{getattr(cls, '__name__', cls)} is not known to update every element alone; legal "
            f"are {[each.__name__ for each in ELEMENTWISE]}; use it on the parameters themselves"
        )
    groups: list[ParameterGroup] = []
    units: list[Unit] = []
    for inner in module.modules():
        unit = unit_of(inner)
        if unit is not None and unit not in units:
            units.append(unit)
            unit.reshard()
            if not all(group.in_place for group in unit.groups):
                unit.adopt(final=True)
            groups += unit.groups
    segments = [segment for group in groups for segment in segments_of(group)]
    if not segments and all(group.flat for group in groups):
        raise ModuleError(f"{type(module).__name__} has no sharded parameter that trains")
    sharded = {id(piece.parameter) for segment in segments for piece in segment.pieces}
    trained = [p for p in module.parameters() if p.requires_grad]
    others = [p for p in trained if id(p) not in sharded]
    return FlatOptimizer(cls, trained, segments, others, units, kwargs)


class FlatOptimizer(torch.optim.Optimizer):
    """What `sharded_optimizer` returns: parameters outside, segments of flat shards inside."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        parameters: Iterable[nn.Parameter],
        segments: Iterable[Segment],
        others: Iterable[nn.Parameter],
        units: Iterable[Unit],
        options: dict[str, Any],
    ) -> None:
        """Make ``cls`` with ``options`` on the segments; ``others`` are stepped as they are.

        ``parameters`` are all of them, in the order that a state dict numbers them in.
        """
        self._segments = list(segments)
        self._others = list(others)
        self._units = list(units)
        flats = [segment.flat for segment in self._segments]
        self._inner = cast(Any, cls)([*flats, *self._others], **options)
        self._shown = 0
        self._made = False
        super().__init__(list(parameters), dict(self._inner.defaults))
        self._made = True
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are stepped one by one from now on.

        Their shards may lie beside those of a segment, which is not made anew for them.

        Args:
            param_group: Parameters and options, as ``cls`` takes them.

        Raises:
            ValueError: A parameter is in a group already, or is no leaf.
        """
        super().add_param_group(param_group)
        if self._made:
            added = self.param_groups[-1]
            self._inner.add_param_group({**added, "params": list(added["params"])})
            self._others += added["params"]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters from their gradients; ``closure`` runs first, with gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all([segment.take_gradients() for segment in self._segments]):
            self._split(_has_gradient)
            for segment in self._segments:
                segment.take_gradients()
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            # A scheduler may have changed them.
            its.update({key: value for key, value in mine.items() if key != "params"})
        self._inner.step()
        for segment in self._segments:
            segment.flat.grad = None
        if len(self._inner.state) != self._shown:
            self._show_state()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and what backwards left that is not reduced yet."""
        for unit in self._units:
            unit.drop_gradients()
        super().zero_grad(set_to_none)

    def _split(self, key: Callable[[Piece], object]) -> None:
        """Step neighbours of different ``key`` as tensors of their own from now on.

        A parameter without gradient is skipped, and its step number is another one ever after.
        """
        parts = [segment.split(key) for segment in self._segments]
        if all(len(each) == 1 for each in parts):
            return
        for segment, each in zip(self._segments, parts, strict=True):
            state: dict[str, Any] = self._inner.state.get(segment.flat, {})
            for part in each if len(each) > 1 and state else ():
                self._inner.state[part.flat] = {
                    name: segment.cut(part, value)
                    if _is_per_element(value, segment.flat)
                    else _own(value)
                    for name, value in state.items()
                }
            if len(each) > 1:
                self._inner.state.pop(segment.flat, None)
        self._segments = [part for each in parts for part in each]
        flats = [segment.flat for segment in self._segments]
        first = self._inner.param_groups[0]
        first["params"] = [*flats, *first["params"][len(parts) :]]
        self._show_state()

    @torch.no_grad()
    def _show_state(self) -> None:
        """Make each parameter's state a view of its segment's."""
        self._shown = len(self._inner.state)
        for segment in self._segments:
            state: dict[str, Any] = self._inner.state.get(segment.flat, {})
            for piece in segment.pieces if state else ():
                self.state[piece.parameter] = {
                    key: piece.cut(value) if _is_per_element(value, segment.flat) else value
                    for key, value in state.items()
                }
        for other in self._others:
            if other in self._inner.state:
                self.state[other] = self._inner.state[other]

    def state_dict(self) -> dict[str, Any]:
        """Return the state per parameter; what a segment has once, each parameter has of its own.

        Another optimizer that loads it would count a shared step once for each parameter.
        """
        found = super().state_dict()
        found["state"] = {
            number: {key: _own(value) for key, value in state.items()}
            for number, state in found["state"].items()
        }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state per parameter, this optimizer's or that of ``cls`` on the parameters."""
        super().load_state_dict(state_dict)
        self._inner.state.clear()
        self._split(self._loaded)
        for segment in self._segments:
            first = self.state.get(segment.pieces[0].parameter, {})
            self._inner.state[segment.flat] = {
                key: self._joined(segment, key) if _is_sharded(value) else value
                for key, value in first.items()
            }
            if not first:
                del self._inner.state[segment.flat]
        for other in self._others:
            if other in self.state:
                self._inner.state[other] = self.state[other]
        self._show_state()

    def _loaded(self, piece: Piece) -> object:
        """Return what a parameter's state has once, such as its step number."""
        state = self.state.get(piece.parameter, {})
        return {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in state.items()
            if not _is_sharded(value)
        }, state.keys()

    def _joined(self, segment: Segment, key: str) -> Tensor:
        flat = torch.zeros_like(segment.flat)
        for piece in segment.pieces:
            loaded = self.state[piece.parameter][key]
            part = piece.owner.part
            part(piece.cut(flat)).copy_(part(loaded))
        return flat


def _has_gradient(piece: Piece) -> bool:
    return piece.parameter.grad is not None


def _is_per_element(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _own(value: Any) -> Any:
    shared = isinstance(value, Tensor) and not _is_sharded(value)
    return value.clone() if shared else value


def _is_sharded(value: object) -> bool:
    return isinstance(value, DTensor | RaggedTensor)
