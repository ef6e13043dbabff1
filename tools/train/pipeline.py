"""Pipeline parallelism: stages of the model on different ranks, run by torch's schedules."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from hp_cp import position_ids
from hp_dtensor import Axis, Collectives
from hp_mesh import ParallelMesh

from .config import TrainConfig
from .model import LanguageModel
from .parallelize import sequence_layout

SCHEDULES: Mapping[str, Any] = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def stages_of(model: LanguageModel, mesh: ParallelMesh, per_rank: int) -> dict[int, LanguageModel]:
    """Return this rank's stages of an unsplit model by their number.

    Stages follow each other from rank to rank of ``pp``, in ``per_rank`` rounds. If the number of
    layers is not a multiple of the number of stages, stages differ by one layer.
    """
    ranks, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    return {
        stage: model.stage(layers_of(len(model.blocks), stage, ranks * per_rank))
        for stage in range(rank, ranks * per_rank, ranks)
    }


def layers_of(layers: int, stage: int, stages: int) -> range:
    """Return the layers of one stage."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def build_pipeline(
    model: LanguageModel,
    mesh: ParallelMesh,
    train: TrainConfig,
    *,
    schedule: str,
    stages_per_rank: int,
    parallelize_stage: Callable[[LanguageModel], object],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> "tuple[LanguageModel, Pipeline]":
    """Split a model into stages and parallelize those of this rank. Communicates nothing.

    Args:
        model: The unsplit model.
        mesh: The mesh, with the axis ``pp``.
        train: Batch and sequence sizes.
        schedule: A key of `SCHEDULES`.
        stages_per_rank: Number of stages on each rank.
        parallelize_stage: Parallelizes one stage in place.
        dtype: dtype of activations between layers.
        device: Device of the stages.

    Returns:
        The layers of this rank as one module, for optimizer and checkpoint, and the pipeline.
    """
    layout, config = sequence_layout(mesh), model.config
    if config.tie_word_embeddings and model.head is not None:  # no rank has embedding and head
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    stages = stages_of(model, mesh, stages_per_rank)
    positions = position_ids(mesh["cp"], layout, train.seq_len, device=torch.device(device))
    for stage in stages.values():
        stage.position_ids = positions
        parallelize_stage(stage)
    rows = train.batch_size // (mesh["batch"].size() * train.accumulate)
    columns = len(positions)
    with torch.device("meta"):
        shape = (rows, columns // mesh["tp"].size(), config.hidden_size)
        hidden = torch.empty(shape, dtype=dtype, requires_grad=True)
        logits = torch.empty(rows, columns, config.vocab_size, dtype=dtype, requires_grad=True)
        microbatch = torch.empty(rows, columns, dtype=torch.int64)
    pipeline = Pipeline(
        stages,
        mesh,
        schedule=schedule,
        microbatches=train.accumulate,
        microbatch=microbatch,
        hidden=hidden,
        logits=logits,
        device=torch.device(device),
    )
    held = [int(layer) for stage in stages.values() for layer in stage.blocks]
    parts = model.stage(held)
    if config.tie_word_embeddings:
        pipeline.tied = TiedEnds(parts, Axis.of(mesh["pp"]))
    return parts, pipeline


class TiedEnds:
    """The tied weight on two ranks: the embedding of the first stage and the head of the last.

    Both start with the same values and get the same updates. Their gradients are summed on the
    first stage. Between `collect` and `share` the last stage has none, so that the norm of all
    gradients counts the weight once.
    """

    def __init__(self, parts: LanguageModel, axis: Axis) -> None:
        self._axis = axis
        last, end = axis.size - 1, axis.index
        module = parts.embedding if end == 0 else parts.head if end == last else None
        self._weight = None if module is None else module.weight
        self._gradient: Tensor | None = None

    def collect(self, collectives: Collectives) -> None:
        """Add the head's gradient to the embedding's: one message from the last stage."""
        if self._weight is None or self._weight.grad is None:
            return
        gradient, last = _local(self._weight.grad), self._axis.size - 1
        if self._axis.index == 0:
            other = torch.empty_like(gradient)
            collectives.send_recv(self._axis, {}, {last: other}).wait()
            gradient += other
        else:
            collectives.send_recv(self._axis, {0: gradient}, {}).wait()
            self._gradient, self._weight.grad = self._weight.grad, None

    def share(self, collectives: Collectives) -> None:
        """Give the head the embedding's gradient: one message to the last stage."""
        if self._weight is None:
            return
        if self._gradient is not None:
            self._weight.grad, self._gradient = self._gradient, None
            collectives.send_recv(self._axis, {}, {0: _local(self._weight.grad)}).wait()
        elif self._weight.grad is not None:
            last = self._axis.size - 1
            collectives.send_recv(self._axis, {last: _local(self._weight.grad)}, {}).wait()


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's part as a view."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class Pipeline:
    """The stages of one rank, run by one of torch's schedules.

    Tensors on the meta device describe the inputs and outputs of a stage on this rank: the first
    stage gets ``microbatch`` (tokens ``[batch, seq]``), the last one returns ``logits``, and
    ``hidden`` are the activations between stages.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: ParallelMesh,
        *,
        schedule: str,
        microbatches: int,
        microbatch: Tensor,
        hidden: Tensor,
        logits: Tensor,
        device: torch.device,
    ) -> None:
        self.axis = Axis.of(mesh["pp"])
        last = self.axis.size * len(stages) - 1
        self._first, self._last = 0 in stages, last in stages
        self._loss: Callable[[Tensor, Tensor], Tensor] | None = None
        self.tied: TiedEnds | None = None
        self._parts = [
            PipelineStage(
                module,
                index,
                last + 1,
                device,
                # Without them torch runs the stages once with uninitialized memory.
                input_args=microbatch if index == 0 else hidden,
                output_args=logits if index == last else hidden,
                group=mesh.group("pp"),
            )
            for index, module in stages.items()
        ]
        self._schedule = SCHEDULES[schedule](
            self._parts if SCHEDULES[schedule] is not Schedule1F1B else self._parts[0],
            microbatches,
            loss_fn=self._loss_of,
            scale_grads=False,  # losses are parts of one mean over all microbatches
        )

    def run(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        train: bool,
    ) -> Tensor:
        """Run all microbatches.

        Args:
            tokens: Tokens ``[batch, seq]`` of this rank.
            labels: Their labels.
            loss: Takes logits and labels of a microbatch.
            train: Also run backward, which adds gradients to the parameters.

        Returns:
            The sum of the losses on the rank of the last stage, zero on other ranks.
        """
        self._loss = loss
        losses: list[Tensor] = []
        call = self._schedule.step if train else self._schedule.eval
        given: Sequence[Tensor] = (tokens,) if self._first else ()
        target: dict[str, Any] = {"target": labels, "losses": losses} if self._last else {}
        call(*given, **target, return_outputs=False)
        if not losses:
            return torch.zeros((), device=labels.device, dtype=torch.float64)
        return torch.stack([each.detach().double() for each in losses]).sum()

    def set_timeout(self, mesh: ParallelMesh, seconds: float) -> None:
        """Set how long a stage waits for another one from now on. All ranks of the mesh call this.

        gloo's sends and receives use the timeout with which their group was created, and torch's
        schedules pass no other timeout to ``wait``, so the stages get a new group. NCCL uses the
        present timeout of the group.
        """
        if mesh.device_type != "cpu":
            return
        ranks = sorted({mesh.layout.group("pp", rank) for rank in range(mesh.layout.world_size)})
        group, _ = dist.new_subgroups_by_enumeration(
            [list(each) for each in ranks], timeout=timedelta(seconds=seconds), backend="gloo"
        )
        for part in self._parts:
            part.group = group

    def _loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one microbatch by the function of the current `run`."""
        if self._loss is None:
            raise RuntimeError("losses are computed only while Pipeline.run runs")
        return self._loss(logits, labels)
