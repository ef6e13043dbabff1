"""One group: parameters of one dtype that are gathered and reduced in one collective each."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import Collectives, Work

from ._gradients import DataAxes, Reduction
from ._parameters import ShardedParameter
from ._states import Event, ParameterState, advance
from ._torch import local_of, set_local
from .layouts._exact import ExactLayout


class ParameterGroup:
    """Parameters whose shards are one flat buffer, and where they are in their life."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        axes: DataAxes,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        """Copy this rank's rows; nothing is communicated, and registered only on request."""
        self.parameters = list(parameters)
        self.axes = axes
        self._collectives = collectives
        self._work: Work | None = None
        self.state = ParameterState.SHARDED
        shapes, kept = [], []
        for parameter in self.parameters:
            whole = cast(Tensor, parameter.original()).detach()
            whole = local_of(whole) if isinstance(whole, DTensor) else whole
            shapes.append(tuple(whole.shape))
            kept.append(_own_rows(whole, axes).to(device))
        self.layout = ExactLayout(kept, shapes, axes.shard)
        for parameter, local in zip(self.parameters, self.layout.shards, strict=True):
            parameter.build_sharded(local)
        self._build_unsharded()

    def install_sharded(self) -> None:
        """Register the sharded parameters with their modules."""
        for parameter in self.parameters:
            parameter.install_sharded()

    def _build_unsharded(self) -> None:
        for parameter, full in zip(self.parameters, self.layout.fulls, strict=True):
            parameter.build_unsharded(full)
        self.layout.free()

    def gather(self) -> None:
        """Start the all-gather unless it was started or has arrived."""
        if self.state is ParameterState.SHARDED:
            self.state = advance(self.state, Event.GATHER)
            with torch.no_grad():
                self._work = self.layout.gather(self.axes.shard, self._collectives)

    def unshard(self) -> None:
        """Wait for the all-gather, started here if need be, and register unsharded parameters."""
        self.gather()
        if self.state is ParameterState.GATHERING:
            with torch.no_grad():
                self.layout.finish_gather(self._work)
            self._work = None
            self.state = advance(self.state, Event.ARRIVE)
            for parameter in self.parameters:
                parameter.install_unsharded()

    def reshard(self) -> None:
        """Register sharded parameters and free the gathered ones; a gather under way is awaited."""
        if self.state is ParameterState.GATHERING:
            self.unshard()
        if self.state is ParameterState.UNSHARDED:
            self.state = advance(self.state, Event.RESHARD)
            self.install_sharded()
            self.layout.free()

    def reset(self) -> None:
        """Come back to sharded from any state; gradients not yet reduced are dropped."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self.state = advance(self.state, Event.RESET)
        for parameter in self.parameters:
            parameter.unsharded.grad = None
            parameter.install_sharded()
        self.layout.free()

    def reduce(self, divide: float | None) -> Reduction | None:
        """Start the reduction of the gradients, zeros where there are none; None if all frozen."""
        chosen = [i for i, p in enumerate(self.parameters) if p.sharded.requires_grad]
        if not chosen:
            return None
        with torch.no_grad():
            return Reduction(
                [self.parameters[i] for i in chosen],
                [self.layout.plan.slots[i] for i in chosen],
                self.axes,
                self._collectives,
                divide,
            )

    @property
    def in_place(self) -> bool:
        """Return whether modules hold the group's parameters, and those the flat shard's memory."""
        return self.state is not ParameterState.SHARDED or all(
            map(ShardedParameter.in_place, self.parameters, self.layout.shards)
        )

    def refusals(self) -> list[str]:
        """Return why `adopt` cannot take what is registered now: nothing if it can."""
        said = [said for parameter in self.parameters if (said := parameter.refusal()) is not None]
        if said:
            return said
        kinds: dict[str, list[str]] = {}
        for parameter in self.parameters:
            local = parameter.local()
            kinds.setdefault(f"{local.dtype} on {local.device}", []).append(parameter.name)
        if len(kinds) == 1:
            return []
        listed = " and ".join(f"{names} of {kind}" for kind, names in kinds.items())
        return [f"a group has parameters {listed}; convert all of them, or none"]

    @torch.no_grad()
    def adopt(self) -> None:
        """Bring parameters that were replaced or converted from outside back to the flat shard.

        ``load_state_dict(assign=True)`` and ``Module.to`` give parameters memory of their own. The
        group is sharded, and `refusals` has none.
        """
        for parameter in self.parameters:
            parameter.take_replacement()
        locals_ = [parameter.local() for parameter in self.parameters]
        views = self.layout.shards
        kinds = {(x.dtype, x.device) for x in locals_}
        if kinds == {(self.layout.shard.dtype, self.layout.shard.device)}:
            for view, local in zip(views, locals_, strict=True):
                if local is not view:
                    view.copy_(local)
        else:
            shapes = [slot.shape for slot in self.layout.plan.slots]
            self.layout = ExactLayout(locals_, shapes, self.axes.shard)
            self._build_unsharded()
        for parameter, view in zip(self.parameters, self.layout.shards, strict=True):
            set_local(cast(DTensor, parameter.sharded), view)


def _own_rows(whole: Tensor, axes: DataAxes) -> Tensor:
    rows = -(-whole.shape[0] // axes.shard.size)
    return whole[axes.shard.index * rows : (axes.shard.index + 1) * rows]
