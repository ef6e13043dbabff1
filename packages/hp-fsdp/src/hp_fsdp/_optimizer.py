"""`sharded_optimizer`: an optimizer that updates many sharded parameters as one flat tensor."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, starmap, zip_longest
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor

from ._errors import (
    ArgumentTypeError,
    ModuleError,
    ModuleTypeError,
    ShardingError,
    StateError,
    shown,
)
from ._group import ParameterGroup
from ._param import ShardedParameter
from ._schedule import drop_gradients
from ._torch import gradient_of, training
from ._unit import Unit, units_in
from .layout import in_own_storage


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter in a `Segment`. Its first element has the offset ``start`` in the segment."""

    owner: ShardedParameter
    start: int

    @property
    def parameter(self) -> nn.Parameter:
        """Return the sharded parameter."""
        return self.owner.sharded

    def cut(self, flat: Tensor) -> Tensor:
        """Return this parameter's elements of ``flat``, with the layout of the sharded parameter.

        ``flat``: 1-D tensor with one element per element of the segment, such as an optimizer
        state. The result is a view of it.
        """
        local = self.owner.part(self.parameter)
        held = flat[self.start : self.start + local.numel()]
        return self.owner.wrap(in_own_storage(held.view(local.shape)))


class Segment:
    """Neighbouring trainable parameters of a flat shard. The optimizer updates them as one tensor.

    Args:
        group: The group of the parameters.
        members: Indices of the parameters in the group, in the order of the flat shard.

    Attributes:
        flat: A 1-D parameter over the memory of ``members``, which the inner optimizer updates.
        pieces: One `Piece` for each of ``members``, in the same order.
    """

    def __init__(self, group: ParameterGroup, members: Sequence[int]) -> None:
        spans = [group.layout.shard_ranges[i] for i in members]
        first, end = spans[0][0], spans[-1][1]
        self._group = group
        self._members = tuple(members)
        self._sharded = [group.table.sharded[i] for i in members]
        self._part = group.parameters[0].part
        self._shard = group.layout.shard
        self.pieces = [
            Piece(group.parameters[i], start - first)
            for i, (start, _) in zip(members, spans, strict=True)
        ]
        # If shards are uneven, a rank may have empty shards. An empty shard has no address.
        self._filled = [k for k, i in enumerate(members) if group.layout.shards[i].numel()]
        self._starts = [self.pieces[k].start for k in self._filled]
        self._offsets = [
            (start - self._starts[0]) * self._shard.element_size() for start in self._starts
        ]
        self.flat = nn.Parameter(self._shard[first:end])
        group.table.moved()  # updates the expected reference count, which includes `flat` now

    @torch.no_grad()
    def take_gradients(self) -> bool:
        """Set ``flat.grad`` to the concatenated gradients of all parameters.

        Copies nothing if the gradients are adjacent in memory, as after a backward. If no parameter
        has a gradient, sets ``flat.grad`` to None.

        Returns:
            False if only some parameters have a gradient. The caller then has to call `split`.
            True otherwise.

        Raises:
            StateError: Parameters were replaced, converted or moved since the segment was created.
        """
        sharded = map(self._group.table.sharded.__getitem__, self._members)
        if (
            self._group.layout.shard is not self._shard
            or self._group.table.moved()
            or not _are_same(sharded, self._sharded)
        ):
            raise StateError(
                "parameters were replaced, converted or moved after the optimizer was made; create "
                "it again"
            )
        found = list(map(gradient_of, self._sharded))
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            self.flat.grad = None
            return not gradients
        parts = [self._part(gradients[k]) for k in self._filled]
        adjacent = self._adjacent(parts)
        self.flat.grad = self._packed(parts) if adjacent is None else adjacent
        return True

    def split(self, key: Callable[[Piece], object]) -> "list[Segment]":
        """Return one segment for each run of neighbouring parameters with the same ``key``.

        The new segments share the memory of this one. If all parameters have the same key, the
        result is ``[self]``.
        """
        pairs = zip(self._members, map(key, self.pieces), strict=True)
        runs = [[i for i, _ in run] for _, run in groupby(pairs, lambda pair: pair[1])]
        return [self] if len(runs) == 1 else [Segment(self._group, run) for run in runs]

    def cut(self, part: "Segment", value: Tensor) -> Tensor:
        """Return the part of ``value`` that belongs to ``part``, as a view.

        ``part``: one of the segments that `split` returned. ``value``: 1-D tensor of the length of
        ``flat``, such as ``exp_avg``.
        """
        start = part.flat.storage_offset() - self.flat.storage_offset()
        return value[start : start + len(part.flat)]

    def _adjacent(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return one 1-D view of all ``parts``, or None if they are not adjacent in memory.

        ``parts``: the non-empty gradients, in the order of the flat shard.
        """
        addresses = list(map(Tensor.data_ptr, parts))
        if not parts or [address - addresses[0] for address in addresses] != self._offsets:
            return None
        begin = parts[0].storage_offset() - self._starts[0]
        end = (begin + len(self.flat)) * parts[0].element_size()
        # If the storage of the first part contains this range, all parts are in this storage.
        inside = begin >= 0 and end <= parts[0].untyped_storage().nbytes()
        if not inside or not all(map(Tensor.is_contiguous, parts)):
            return None
        return parts[0].as_strided((len(self.flat),), (1,), begin)

    def _packed(self, parts: Sequence[Tensor]) -> Tensor:
        out = torch.zeros_like(self.flat)
        for start, part in zip(self._starts, parts, strict=True):
            out[start : start + part.numel()].copy_(part.reshape(-1))
        return out


# On one rank, parameters of at least this size are updated one by one. Copying smaller gradients
# together takes less time than a separate update.
LARGE_BYTES = 64 * 1024


def segments_of(group: ParameterGroup) -> list[Segment]:
    """Return the segments of a group.

    A frozen parameter or a gap between two parameters ends a segment. On one rank, gradients are
    not packed, so a segment of several parameters would copy them. Large parameters are segments of
    their own there. Returns an empty list for parameters with all-gather extensions, because their
    group has no flat shard.
    """
    if not group.flat:
        return []
    spans = group.layout.shard_ranges
    large = math.inf
    if group.axes.size == 1:
        large = LARGE_BYTES / group.layout.shard.element_size()
    runs: list[list[int]] = []
    last, alone = -1, False
    for i in group.order:
        if not group.parameters[i].sharded.requires_grad:
            continue
        was_alone, alone = alone, spans[i][1] - spans[i][0] >= large
        if alone or was_alone or spans[i][0] != last:
            runs.append([])
        runs[-1].append(i)
        last = spans[i][1]
    return [Segment(group, run) for run in runs]


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
    """Create an optimizer that updates the shards of many parameters as one flat tensor.

    Results, parameter groups, state and ``state_dict`` are the same as with ``cls`` on the separate
    parameters. If you change the state, the next step uses the changed state. Communicates nothing.

    - A parameter without a gradient is skipped. From then on, this parameter and its neighbours
      with a gradient are updated as separate tensors.
    - Parameters that ``add_param_group`` adds are updated one by one.
    - If a parameter is frozen now and is trained later, add it with ``add_param_group``. Until it
      is added, ``step`` does not update it and warns once.

    Args:
        cls: One of torch's optimizers with elementwise updates: ``Adadelta``, ``Adagrad``,
            ``Adam``, ``AdamW``, ``Adamax``, ``NAdam``, ``RAdam``, ``RMSprop`` or ``SGD``.
        module: A sharded module. All its parameters that require grad are optimized.
        **kwargs: Options of ``cls``, such as ``lr``.

    Returns:
        An optimizer with the interface of ``cls``.

    Raises:
        ModuleError: ``module`` is not a module, or has no sharded parameters that require grad.
        ShardingError: ``cls`` is not one of these optimizers.

    Examples:
        On 4 ranks:

        >>> model = fully_shard(nn.Linear(8, 8))
        >>> optimizer = sharded_optimizer(torch.optim.AdamW, model, lr=1e-3)
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise ModuleTypeError(f"module is {shown(given)}; allowed: a sharded module")
    made: object = cls
    if isinstance(made, torch.optim.Optimizer):
        raise ArgumentTypeError(f"cls is an {type(made).__name__}; give the class and its options")
    if cls not in ELEMENTWISE:
        raise ShardingError(
            f"{getattr(cls, '__name__', cls)} is not known to update each element separately; "
            f"allowed: {[each.__name__ for each in ELEMENTWISE]}; use other optimizers on the "
            "parameters"
        )
    units = units_in(module)
    for unit in units:
        unit.reshard_and_wait()
        unit.check_parameters(backward=False)
    groups = [group for unit in units for group in unit.groups]
    segments = [segment for group in groups for segment in segments_of(group)]
    if not segments and all(group.flat for group in groups):
        raise ModuleError(f"{type(module).__name__} has no sharded parameter that trains")
    sharded = {id(piece.parameter) for segment in segments for piece in segment.pieces}
    named = dict(module.named_parameters())
    trained = [p for p in named.values() if p.requires_grad]
    others = [p for p in trained if id(p) not in sharded]
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    return FlatOptimizer(cls, trained, segments, others, units, kwargs, frozen)


class FlatOptimizer(torch.optim.Optimizer):
    """Optimizer of sharded parameters that updates neighbouring parameters as one flat tensor.

    Do not construct this class; call `sharded_optimizer`.

    Args:
        cls: Class of the inner optimizer, which updates the segments.
        parameters: All optimized parameters, in the order of their numbers in a state dict.
        segments: Segments of flat shards.
        others: Optimized parameters that are in no segment.
        units: Units of the module, for `zero_grad`.
        options: Options of ``cls``.
        frozen: Parameters of the module that are not optimized, by name.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        parameters: Iterable[nn.Parameter],
        segments: Iterable[Segment],
        others: Iterable[nn.Parameter],
        units: Iterable[Unit],
        options: dict[str, Any],
        frozen: Mapping[str, nn.Parameter],
    ) -> None:
        self._frozen = dict(frozen)
        self._segments = list(segments)
        self._others = list(others)
        self._units = list(units)
        flats = [segment.flat for segment in self._segments]
        self._inner = cast(Any, cls)([*flats, *self._others], **options)
        self._shown = 0
        self._made = False
        super().__init__(list(parameters), dict(self._inner.defaults))
        self._made = True
        self._listed = [list(group["params"]) for group in self.param_groups]
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Its parameters are updated one by one, not as one flat tensor.

        Args:
            param_group: Parameters and options, as in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: A parameter is in a group already, or is not a leaf.
        """
        super().add_param_group(param_group)
        if self._made:
            added = self.param_groups[-1]
            self._inner.add_param_group({**added, "params": list(added["params"])})
            self._others += added["params"]
            self._listed.append(list(added["params"]))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with their gradients.

        Args:
            closure: Called first, with gradients enabled. Returns the loss.

        Returns:
            The result of ``closure``, or None.

        Raises:
            StateError: The parameters of a group were changed without `add_param_group`; or
                parameters of the module were replaced, converted or moved since the optimizer was
                created.
        """
        for number, (group, listed) in enumerate(zip(self.param_groups, self._listed, strict=True)):
            if not _are_same(group["params"], listed):
                raise StateError(
                    f"the parameters of group {number} were changed; freeze those that are not to "
                    "be stepped, give others to add_param_group, or create the optimizer again"
                )
        if self._frozen and any(training(self._frozen.values())):
            self._warn_of_unfrozen()
        if not self._is_shown():
            self._take_state()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all([segment.take_gradients() for segment in self._segments]):
            self._split(_has_gradient)
            for segment in self._segments:
                segment.take_gradients()
        for mine, its in zip(self.param_groups, self._inner.param_groups, strict=True):
            # A learning rate scheduler may have changed these options.
            its.update({key: value for key, value in mine.items() if key != "params"})
        self._inner.step()
        for segment in self._segments:
            segment.flat.grad = None
        if len(self._inner.state) != self._shown:
            self._show_state()
        return loss

    def _warn_of_unfrozen(self) -> None:
        """Warn once about parameters that require grad now and are in no parameter group."""
        added = {id(p) for group in self.param_groups for p in group["params"]}
        self._frozen = {name: p for name, p in self._frozen.items() if id(p) not in added}
        unfrozen = [name for name, p in self._frozen.items() if p.requires_grad]
        for name in unfrozen:
            del self._frozen[name]
        if unfrozen:
            warnings.warn(
                f"{unfrozen} train, and this optimizer does not step them: they were frozen when "
                "it was made; give them to add_param_group, or to another optimizer",
                stacklevel=3,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including gradients that are not reduced yet.

        Args:
            set_to_none: If True, set gradients to None. If False, set them to zero. Gradients that
                are not reduced yet are dropped in both cases.
        """
        drop_gradients(self._units)
        super().zero_grad(set_to_none)

    def _split(self, key: Callable[[Piece], object]) -> None:
        """Split each segment between neighbouring parameters with different values of ``key``.

        The split is permanent, because a parameter that was skipped once has another step number
        than its neighbours from then on.
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
        """Set ``self.state`` of each parameter to views of the state of its segment."""
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
        own = (piece.parameter for segment in self._segments for piece in segment.pieces)
        self._views: list[dict[str, Any]] = [self.state[p] for p in own if p in self.state]
        self._values = list(chain.from_iterable(map(dict.values, self._views)))
        self._states = list(self.state.values())

    def _is_shown(self) -> bool:
        """Return whether ``self.state`` is unchanged since the last call of `_show_state`."""
        values = chain.from_iterable(map(dict.values, self._views))
        return _are_same(self.state.values(), self._states) and _are_same(values, self._values)

    @torch.no_grad()
    def _take_state(self) -> None:
        """Copy ``self.state`` to the inner optimizer's states, one state per `Segment`.

        Called if the user has loaded or edited ``self.state``.
        """
        self._inner.state.clear()
        self._split(self._loaded)
        for segment in self._segments:
            first = self.state.get(segment.pieces[0].parameter, {})
            self._inner.state[segment.flat] = {
                key: self._joined(segment, key) if _is_sharded(value) else _own(value)
                for key, value in first.items()
            }
            if not first:
                del self._inner.state[segment.flat]
        for other in self._others:
            if other in self.state:
                self._inner.state[other] = self.state[other]
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with one state per parameter.

        Each parameter gets a separate copy of the step number. If parameters shared one tensor, an
        optimizer that loads the state would increment that tensor once per parameter.

        Returns:
            A state dict in the format of ``cls`` on the separate parameters.
        """
        found = super().state_dict()
        found["state"] = {
            number: {key: _own(value) for key, value in state.items()}
            for number, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of ``cls`` on the separate parameters.

        Args:
            state_dict: A state dict for the same parameters, in the same order.
        """
        super().load_state_dict(state_dict)
        self._take_state()

    def _loaded(self, piece: Piece) -> object:
        """Return a key for `_split`. Only parameters with equal keys can share a segment.

        The key has the names of all states, such as ``"exp_avg"``. It also has the values of states
        that are not per element, such as the step number.
        """
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


def _are_same(found: Iterable[object], known: Iterable[object]) -> bool:
    """Return whether both iterables yield the same objects. Compares in C with ``is``."""
    return all(starmap(is_, zip_longest(found, known, fillvalue=...)))


def _has_gradient(piece: Piece) -> bool:
    return piece.parameter.grad is not None


def _is_per_element(value: object, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def _own(value: Any) -> Any:
    shared = isinstance(value, Tensor) and not _is_sharded(value)
    return value.clone() if shared else value


def _is_sharded(value: object) -> bool:
    return isinstance(value, DTensor | RaggedTensor)
