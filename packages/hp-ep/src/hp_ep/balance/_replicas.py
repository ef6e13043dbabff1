"""Replicas stay one expert: each gets the gradient of all."""

from typing import Any

import torch
from torch import Tensor

from hp_dtensor import Axis, Collectives, TorchCollectives

from .._torch import first_order, run_several
from ._placement import Placement


class ReplicaSum:
    """Sums the gradients of an expert's replicas, in the order of their ranks: all get one value.

    Backward makes one all-to-all over ``axis`` where the placement has replicas; each holder sends
    its gradient to each other one. Experts with a single slot are left alone.
    """

    def __init__(
        self,
        axis: Axis,
        placement: Placement,
        collectives: Collectives | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.axis = axis
        self.placement = placement
        self.collectives: Collectives = TorchCollectives() if collectives is None else collectives
        holders = [
            {slot // placement.slots_per_rank for slot in slots} for slots in placement.slots_of
        ]
        here = placement.on_rank(axis.index)
        self.exist = any(len(h) > 1 for h in holders)
        # What is sent to a rank and what comes from it: the experts that both hold, in one order.
        self._shared = [
            sorted(e for e in here if rank != axis.index and rank in holders[e])
            for rank in range(axis.size)
        ]
        self._slot = {e: slot for slot, e in enumerate(here)}
        sent = [self._slot[e] for shared in self._shared for e in shared]
        self._order = torch.tensor(sent, dtype=torch.int64, device="cpu")
        # On the device from the start: backward must not wait for a copy.
        self._sent = self._order.to(device)

    def moved_to(self, placement: Placement) -> "ReplicaSum":
        """Return the same for another placement on the same ranks."""
        return ReplicaSum(self.axis, placement, self.collectives, device=self._sent.device)

    def share(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``weights``, each ``[slots here, ...]``, whose gradients will be those of all.

        Frozen ones come as they are, and nothing of them is sent.
        """
        trained = [w for w in weights if w.requires_grad]
        if not (self.exist and trained):
            return weights
        device = trained[0].device
        if self._sent.device != device:  # the layer got its memory elsewhere
            self._sent = self._order.to(device)
        shared = iter(run_several(_Share, self, *trained))
        return tuple(next(shared) if w.requires_grad else w for w in weights)

    def add(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients ``[slots here, ...]``, those of replicas summed."""
        sent = torch.cat([g.index_select(0, self._sent).flatten(1) for g in grads], 1)
        splits = [len(shared) for shared in self._shared]
        (received,) = self.collectives.all_to_all(self.axis, sent, splits, splits).wait()
        parts: dict[int, list[Tensor]] = {}
        row = 0
        for rank, shared in enumerate(self._shared):
            if rank == self.axis.index:
                for expert in {e for held in self._shared for e in held}:
                    own = [g[self._slot[expert]].flatten() for g in grads]
                    parts.setdefault(expert, []).append(torch.cat(own))
            for expert in shared:
                parts.setdefault(expert, []).append(received[row])
                row += 1
        totals = [g.clone() for g in grads]  # a gradient may be another's memory
        for expert, several in parts.items():
            pieces = torch.stack(several).sum(0).split([g[0].numel() for g in grads])
            for total, piece in zip(totals, pieces, strict=True):
                place = total[self._slot[expert]]
                place.copy_(piece.view(place.shape))
        return totals


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicas: ReplicaSum, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.replicas.add(list(grads))
