"""Rows sorted by expert, to the ranks that hold the experts and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives

from .._errors import ExpertConfigError
from .._permutation import block_indices, invert, reorder
from ._faults import REPORT_SIZE
from ._host import Reading, start_reading
from ._terms import check_number_of_ranks, or_torch
from ._trip import Trip, arrive, depart, embark, start
from ._verdict import needs_grad, raise_faults


def expert_axis(mesh: AxisMesh | Axis) -> Axis:
    """Return the axis of a 1-D mesh, whatever its name, or the axis ``ep`` of a larger one."""
    if isinstance(mesh, Axis):
        return mesh
    if mesh.ndim == 1:
        return Axis.of(mesh, 0)
    names = mesh.mesh_dim_names or ()
    if "ep" not in names:
        raise ExpertConfigError(
            f"no axis 'ep' in a mesh with axes {list(names)}; pass the 1-D mesh of the axis that "
            "splits the experts"
        )
    return Axis.of(mesh, "ep")


def check_divides(axis: Axis, num_experts: int) -> None:
    """Raise an `ExpertConfigError` if the experts do not split evenly over ``axis``."""
    check_number_of_ranks(axis.name, axis.size, num_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """An exchange of counts under way, to the host."""

    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Who gets how many rows in one call, and their order once they are here."""

    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    counts: Tensor
    """Rows per local expert ``[local experts]``."""
    indices: Tensor | None
    inverse: Tensor | None
    needs_grad: bool
    """Whether any rank's rows need a gradient."""

    @property
    def num_rows(self) -> int:
        """Return how many rows this rank's experts get."""
        return sum(self.receive_splits)


class RowExchange:
    """Moves rows that lie by global expert to the ranks of those experts; holds no call's state.

    Rank ``i`` of the axis holds experts ``i * e .. (i + 1) * e - 1`` of ``num_experts``, which the
    axis's size must divide.
    """

    def __init__(
        self, axis: Axis, num_experts: int, collectives: Collectives | None = None
    ) -> None:
        self.axis = axis
        self.num_experts = num_experts
        self.experts_per_rank = num_experts // axis.size
        self._collectives = or_torch(collectives)

    def announce(self, counts: Tensor, report: Tensor) -> Announcement:
        """Start telling every rank how many rows it gets; one all-to-all over the axis.

        ``counts [num_experts]`` are this rank's rows per global expert; ``report [3]`` goes to all.
        """
        blocks = counts.long().view(self.axis.size, self.experts_per_rank)
        sent = torch.cat([blocks, report.expand(self.axis.size, REPORT_SIZE)], 1)
        work = self._collectives.all_to_all(self.axis, sent)
        return Announcement(reading=start_reading(work, sent))

    def plan(self, announcement: Announcement) -> RowPlan:
        """Return the plan once all counts are here; the call's one device-to-host synchronisation.

        Raises a `RoutingError` on every rank if any of them announced a fault or other rows.
        """
        received, (sent, got) = announcement.reading.wait()
        local = self.experts_per_rank
        reports = [row[local:] for row in got]
        raise_faults(reports, self.axis.ranks)
        rows_need_grad, _ = needs_grad(reports)
        send, receive = (tuple(sum(row[:local]) for row in side) for side in (sent, got))
        counts = received[:, :local]
        if local == 1 or self.axis.size == 1:  # rank-major is expert-major then
            return RowPlan(
                send_splits=send,
                receive_splits=receive,
                counts=counts.sum(0),
                indices=None,
                inverse=None,
                needs_grad=rows_need_grad,
            )
        indices, per_expert = block_indices(
            counts.reshape(-1), local, self.axis.size, num_rows=sum(receive)
        )
        return RowPlan(
            send_splits=send,
            receive_splits=receive,
            counts=per_expert,
            indices=indices,
            inverse=invert(indices),
            needs_grad=rows_need_grad,
        )

    def embark(self, rows: Tensor, announcement: Announcement) -> Trip:
        """Return rows that `start` will send, from the stream that reads the counts if any does."""
        return embark(rows, self.axis, self._collectives, announcement.reading.side)

    def start(self, trip: Trip, plan: RowPlan) -> Trip:
        """Start bringing rows to their experts; one all-to-all, and one in backward."""
        return start(trip, plan.send_splits, plan.receive_splits, needs_grad=plan.needs_grad)

    def depart(self, rows: Tensor, plan: RowPlan) -> Trip:
        """Start bringing rows to their experts, from where they are computed."""
        return self.start(embark(rows, self.axis, self._collectives), plan)

    def arrive(self, trip: Trip, plan: RowPlan) -> Tensor:
        """Return the rows for the local experts, by expert, once they are here."""
        here = arrive(trip)
        if plan.indices is None or plan.inverse is None:
            return here
        return reorder(here, plan.indices, plan.inverse)

    def send_back(self, rows: Tensor, plan: RowPlan) -> Trip:
        """Start returning the rows to where they came from; `arrive` of the trip gives them."""
        if plan.indices is not None and plan.inverse is not None:
            rows = reorder(rows, plan.inverse, plan.indices)
        return depart(rows, self.axis, plan.receive_splits, plan.send_splits, self._collectives)
