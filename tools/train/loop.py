"""What one step is, and the loop over steps; the same code with and without a mesh."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_cp import cp_loss, position_ids, shard_sequence, shift_labels
from hp_dtensor import Axis, Collectives, TorchCollectives, clip_grad_norm_
from hp_mesh import ParallelMesh

from .config import TrainConfig
from .data import IGNORED, Batch, Samples
from .parallelize import sequence_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step, counted from 1: the loss of the whole batch in nats per byte, before the update."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    seconds: float


class Trainer:
    """A model, its optimizer, and how far the run is (`step`, `samples` consumed).

    With a ``mesh`` the model is what `parallelize` returned on it, and every rank gets the same
    whole batches and takes its part of them; without one this is the plain single-process run.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        mesh: ParallelMesh | None = None,
        device: torch.device | str = "cpu",
        collectives: Collectives | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.optimizer = make_optimizer(model, config)
        self.step = 0
        self.samples = 0
        self._mesh = mesh
        self.device = torch.device(device)
        self._collectives = TorchCollectives() if collectives is None else collectives
        self._layout = sequence_layout(mesh)
        self._positions = (
            torch.arange(config.seq_len, device=self.device)
            if mesh is None
            else position_ids(mesh["cp"], self._layout, config.seq_len, device=self.device)
        )

    def gradients(self, batch: Batch) -> float:
        """Add the gradients of the batch's mean loss to the parameters and return that loss.

        Communicates what the packages do, the number of labels and the loss over ``loss``.
        """
        tokens, labels = self._part(batch)
        logits: Tensor = self.model(tokens, self._positions)
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count = (labels != IGNORED).sum()
        if self._mesh is None:
            loss = total / count
            loss.backward()
            return loss.item()
        loss = cp_loss(total, count, self._mesh["loss"], collectives=self._collectives)
        loss.backward()
        axis = Axis.of(self._mesh["loss"])
        (whole,) = self._collectives.all_reduce(axis, [loss.detach().clone()]).wait()
        return whole.item()

    def update(self) -> float:
        """Clip the gradients, step the optimizer, drop the gradients; return the norm before."""
        parameters, max_norm = self.model.parameters(), self.config.max_norm
        if self._mesh is None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            norm = clip_grad_norm_(parameters, max_norm, collectives=self._collectives)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_of(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def train_step(self, data: Samples) -> StepResult:
        """Take the next batch of ``data`` and make one update."""
        start = time.perf_counter()
        batch = data.batch(self.samples, self.config.batch_size)
        learning_rate = self.config.learning_rate_of(self.step)
        loss = self.gradients(batch)
        norm = self.update()
        self.step += 1
        self.samples = batch.consumed
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            samples=self.samples,
            seconds=time.perf_counter() - start,
        )

    def _part(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens and labels: its rows, then its part of their sequence."""
        tokens = batch.tokens.to(self.device)
        # A label may lie in another rank's part of the sequence: shift first, cut then.
        labels = shift_labels(batch.labels.to(self.device))
        if self._mesh is None:
            return tokens, labels
        rows = self._mesh["batch"]
        tokens, labels = (t.chunk(rows.size())[rows.get_local_rank()] for t in (tokens, labels))
        tokens, labels = shard_sequence((tokens, labels), self._mesh["cp"], self._layout, 1)
        return tokens, labels


def largest_of_ranks(value: int, mesh: ParallelMesh, device: torch.device) -> int:
    """Return the largest ``value`` of all ranks: one all-reduce over ``loss``, one over ``tp``."""
    largest = torch.tensor(value, device=device)
    for name in ("loss", "tp"):
        TorchCollectives().all_reduce(Axis.of(mesh[name]), [largest], op="max").wait()
    return int(largest)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return torch's AdamW with one group of parameters per mesh.

    torch's kernels over lists of DTensors want all of one list on one mesh, and it works out the
    placements of each anew: one fused kernel in place of ten takes a quarter off a short run.
    """
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": parameters} for parameters in by_mesh.values()],
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )
