"""One training step and the evaluation; the same code with and without a mesh."""

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from hp_cp import position_ids, shard_sequence, shift_labels
from hp_dtensor import Axis, Collectives, TorchCollectives, clip_grad_norm_
from hp_fsdp import FSDPModule, sharded_optimizer
from hp_mesh import ParallelMesh

from .config import TrainConfig
from .data import IGNORED, Batch, Samples
from .model import Forward, call_built_in, seed_of
from .parallelize import sequence_layout
from .pipeline import Pipeline

MOST_SKIPPED = 10  # steps in a row whose gradients are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of one step.

    Attributes:
        step: Its number, from 1.
        loss: Mean loss of the batch before the update, in nats per token.
        grad_norm: Norm of all gradients before clipping.
        learning_rate: Learning rate of the update.
        samples: Samples consumed by the run so far.
        tokens: Tokens consumed by this step; fewer at the end of the text.
        seconds: Duration of the step.
        eval_loss: Loss of held-out text after the update, None if it was not computed.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    tokens: int
    seconds: float
    eval_loss: float | None = None


class Diverged(ArithmeticError):
    """The gradients of `MOST_SKIPPED` steps in a row were not finite."""


class Trainer:
    """A model, its optimizer, and the progress of the run (`step`, `samples` consumed).

    Args:
        model: The model, after `parallelize` if there is a mesh. With a pipeline, the parts of all
            stages of this rank.
        config: Batch and optimizer.
        mesh: All ranks get the same batches, and each takes its part. Without one: one process.
        device: Device of the model.
        collectives: Collectives of the sums over ranks.
        forward: Calls the model with tokens and positions, returns logits.
        compute_dtype: Without a mesh, the dtype to which weights are cast when they are used.
        pipeline: Runs the stages of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        mesh: ParallelMesh | None = None,
        device: torch.device | str = "cpu",
        collectives: Collectives | None = None,
        forward: Forward = call_built_in,
        compute_dtype: torch.dtype | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.optimizer = make_optimizer(model, config)
        self.step = 0
        self.samples = 0
        self.skipped = 0  # latest steps in a row whose gradients were not finite
        self.mesh = mesh
        self.device = torch.device(device)
        self._collectives = TorchCollectives() if collectives is None else collectives
        self._forward = forward
        self._compute_dtype = compute_dtype
        self.pipeline = pipeline
        self._layout = sequence_layout(mesh)
        self._positions = (
            torch.arange(config.seq_len, device=self.device)
            if mesh is None
            else position_ids(mesh["cp"], self._layout, config.seq_len, device=self.device)
        )

    def gradients(self, batch: Batch) -> float:
        """Add the gradients of the batch's mean loss to the parameters and return that loss.

        Splits the batch into ``config.accumulate`` microbatches, of the same rows for all degrees.
        All-reduces the number of labels and the loss over ``loss``.
        """
        self._seed_noise()
        parts = [self._part(part) for part in _split(batch, self.config.accumulate)]
        count = torch.stack([_count(labels) for _, labels in parts]).sum()
        count = self._sum_over("loss", count)
        if self.pipeline is not None:
            tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
            whole = self.pipeline.run(
                tokens,
                labels,
                lambda logits, labels: _loss_sum(logits, labels) / count.clamp(min=1),
                train=True,
            )
            return self._sum_over("loss", self._sum_over("pp", whole)).item()
        whole = torch.zeros((), device=self.device, dtype=torch.float64)
        for index, (tokens, labels) in enumerate(parts):
            if isinstance(self.model, FSDPModule) and len(parts) > 1:
                self.model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = _loss_sum(self._logits(tokens), labels) / count.clamp(min=1)
            loss.backward()
            whole += loss.detach()
        return self._sum_over("loss", whole).item()

    def update(self) -> float:
        """Clip the gradients, step the optimizer, drop the gradients.

        If the norm, which all ranks have, is not finite, the parameters do not change.

        Returns:
            The norm before clipping.

        Raises:
            Diverged: It was not finite in `MOST_SKIPPED` calls in a row.
        """
        parameters, max_norm = self.model.parameters(), self.config.max_norm
        if self.mesh is None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        else:
            stages = self.mesh["pp"] if self.mesh["pp"].size() > 1 else None
            tied = None if self.pipeline is None else self.pipeline.tied
            if tied is not None:
                tied.collect(self._collectives)
            norm = clip_grad_norm_(parameters, max_norm, pp=stages, collectives=self._collectives)
            if tied is not None:
                tied.share(self._collectives)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_of(self.step)
        found = norm.item()
        if math.isfinite(found):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.skipped = 0 if math.isfinite(found) else self.skipped + 1
        if self.skipped == MOST_SKIPPED:
            raise Diverged(
                f"the gradients' norm was {found} in {MOST_SKIPPED} steps in a row, the last of "
                f"them step {self.step + 1}, and none of them changed the model; look at the "
                "losses before them, and lower the learning rate or resume from an older checkpoint"
            )
        return found

    def train_step(self, data: Samples) -> StepResult:
        """Take the next batch of ``data`` and make one update."""
        start = time.perf_counter()
        batch = data.batch(self.samples, self.config.batch_size)
        learning_rate = self.config.learning_rate_of(self.step)
        loss = self.gradients(batch)
        norm = self.update()
        self.step += 1
        tokens = (batch.consumed - self.samples) * self.config.seq_len
        self.samples = batch.consumed
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            samples=self.samples,
            tokens=tokens,
            seconds=time.perf_counter() - start,
        )

    @torch.no_grad()
    def evaluate(self, data: Samples) -> float:
        """Return the mean loss of the held-out samples, in nats per token.

        All-reduces the sums of losses and labels over ``loss``.
        """
        self.model.eval()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        # A pipeline runs as many microbatches as in a step. Else a batch is one microbatch.
        parts = self.config.accumulate if self.pipeline is None else 1
        for batch in data.held_out(self.config.batch_size // parts):
            tokens, labels = self._part(batch)
            if self.pipeline is None:
                loss = _loss_sum(self._logits(tokens), labels)
            else:
                loss = self.pipeline.run(tokens, labels, _loss_sum, train=False)
            sums += torch.stack([loss.double(), _count(labels)])
        self.model.train()
        loss, count = self._sum_over("loss", sums)
        # Each stage counts the labels, but only the last one has losses.
        mean: float = (self._sum_over("pp", loss.clone()) / count).item()
        return mean

    def _seed_noise(self) -> None:
        """Seed torch for one step, so that dropout differs on ranks with other tokens or layers.

        It is equal on the ranks of ``tp``, and in a resumed run.
        """
        key = [self.config.seed, self.step]
        if self.mesh is not None:
            key += [self.mesh[name].get_local_rank() for name in ("batch", "cp", "pp")]
        torch.manual_seed(seed_of("/".join(map(str, key))))

    def _logits(self, tokens: Tensor) -> Tensor:
        if self.mesh is not None or self._compute_dtype is None:
            return self._forward(self.model, tokens, self._positions)
        dtype, parameters = self._compute_dtype, self.model.named_parameters()
        weights = {f"model.{name}": parameter.to(dtype) for name, parameter in parameters}
        called = _Called(self.model, self._forward)
        return cast(Tensor, functional_call(called, weights, (tokens, self._positions)))

    def _sum_over(self, name: str, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the axis ``loss`` (parts of a batch) or ``pp``."""
        if self.mesh is None or self.mesh[name].size() == 1:
            return value
        (whole,) = self._collectives.all_reduce(Axis.of(self.mesh[name]), [value]).wait()
        return whole

    def _part(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return this rank's rows and, of these, its part of the sequence: tokens and labels."""
        tokens = batch.tokens.to(self.device)
        # A label may be in another rank's part of the sequence, so shift before sharding.
        labels = shift_labels(batch.labels.to(self.device))
        if self.mesh is None:
            return tokens, labels
        rows = self.mesh["batch"]
        tokens, labels = (t.chunk(rows.size())[rows.get_local_rank()] for t in (tokens, labels))
        tokens, labels = shard_sequence((tokens, labels), self.mesh["cp"], self._layout, 1)
        return tokens, labels


class _Called(nn.Module):
    """A model with the function that calls it, for `functional_call`."""

    def __init__(self, model: nn.Module, call: Forward) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the model's logits."""
        return self.call(self.model, tokens, positions)


def _split(batch: Batch, parts: int) -> list[Batch]:
    pairs = zip(batch.tokens.chunk(parts), batch.labels.chunk(parts), strict=True)
    return [Batch(tokens, labels, batch.consumed) for tokens, labels in pairs]


def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of all labels that are not ignored, in float32 or float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def largest_of_ranks(value: int, mesh: ParallelMesh, device: torch.device) -> int:
    """Return the largest ``value`` of all ranks: all-reduces over ``loss``, ``tp`` and ``pp``."""
    largest = torch.tensor(value, device=device)
    for name in ("loss", "tp", "pp"):
        TorchCollectives().all_reduce(Axis.of(mesh[name]), [largest], op="max").wait()
    return int(largest)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return torch's AdamW, with weight decay of matrices, not of norms and biases.

    Of a sharded model each flat shard is updated as one tensor. What does not decay is updated in
    a group per mesh: torch's kernels over lists of DTensors want all of one list on one mesh.
    """
    decayed: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        for parameter in _vectors(model):  # it takes all that require gradients
            parameter.requires_grad_(False)
        optimizer: torch.optim.Optimizer = sharded_optimizer(torch.optim.AdamW, model, **decayed)
        for parameter in _vectors(model):
            parameter.requires_grad_(True)
    else:
        others = set(_vectors(model))
        matrices = [parameter for parameter in model.parameters() if parameter not in others]
        optimizer = torch.optim.AdamW(matrices, **decayed)
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in _vectors(model):
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    for group in by_mesh.values():
        optimizer.add_param_group({"params": group, "weight_decay": 0.0})
    return optimizer


def _vectors(model: nn.Module) -> list[nn.Parameter]:
    """Return norms and biases. Biases of experts are matrices with one row per expert."""
    named = model.named_parameters()
    return [p for name, p in named if p.ndim < 2 or name.rpartition(".")[2].endswith("bias")]
