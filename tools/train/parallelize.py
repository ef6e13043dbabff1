"""Spread a model over a mesh: each axis in a few lines, in the one order that composes."""

import functools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from hp_cp import ContextParallel, Contiguous, Zigzag
from hp_dtensor import Collectives, TorchCollectives
from hp_ep import BaseExpertParallel, ExpertParallel, ExpertTensorParallel, MoE
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims, ParallelMesh

from .model import Attention, LanguageModel


def parallelize(
    model: LanguageModel,
    mesh: ParallelMesh,
    dims: ParallelDims,
    *,
    collectives: Collectives | None = None,
    checkpoint_activations: bool = False,
) -> LanguageModel:
    """Return ``model``, spread over all axes of ``mesh`` in place.

    Every rank gives the same whole model and keeps its parts; nothing is communicated, but one
    element over context parallel groups on other devices than a CPU. Gradients are summed over
    ranks, so a rank's loss is its share of the whole batch's. ``collectives`` takes all traffic but
    that of torch's tensor parallel styles.
    """
    door = TorchCollectives() if collectives is None else collectives
    if dims.tp > 1:
        apply_tensor_parallel(model, mesh, dims)
    apply_expert_parallel(model, mesh, dims, door)
    if dims.cp > 1:
        apply_context_parallel(model, mesh, dims, door)
    if checkpoint_activations:
        recompute_blocks(model)
    apply_fully_shard(model, mesh, door)
    return model


def apply_tensor_parallel(model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims) -> None:
    """Cut matrices over ``tp`` with torch's styles; between them the sequence is cut.

    The residual stream is each rank's part of the sequence (Korthikanti et al., arXiv 2205.05198,
    section 4.2), and so are the tokens of a mixture of experts where its experts stay whole; where
    they are cut too, every rank gets all tokens.
    """
    tp = mesh["tp"]
    norm = SequenceParallel(use_local_output=True)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_first = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.attention_norm": norm,
        "blocks.*.attention": gather_first,
        "blocks.*.attention.wq": ColwiseParallel(),
        "blocks.*.attention.wk": ColwiseParallel(),
        "blocks.*.attention.wv": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": norm,
    }
    whole = PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        output_layouts=(Replicate(),),
        desired_output_layouts=(Shard(1),),
    )
    for index, block in enumerate(model.blocks):
        if isinstance(block.mlp, MoE):
            plan |= {f"blocks.{index}.mlp": whole} if dims.etp > 1 else {}
        else:
            plan |= {
                f"blocks.{index}.mlp": gather,
                f"blocks.{index}.mlp.w1": ColwiseParallel(),
                f"blocks.{index}.mlp.w3": ColwiseParallel(),
                f"blocks.{index}.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
    # Every rank holds the same values already: no need to send them.
    parallelize_module(model, tp, plan, src_data_rank=None)


def apply_expert_parallel(
    model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims, collectives: Collectives
) -> None:
    """Put each rank's experts on it; the loads are balanced over all tokens of the batch."""
    style: BaseExpertParallel
    if dims.etp > 1:
        style = ExpertTensorParallel(token_axes=mesh["loss"], collectives=collectives)
    else:
        style = ExpertParallel(
            token_axes=mesh["loss", "tp"],
            sequence_mesh=mesh["tp"] if dims.tp > 1 else None,
            collectives=collectives,
        )
    over = mesh["ep", "etp"] if dims.etp > 1 else mesh["ep"]
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            parallelize_module(block.mlp, over, style)


def apply_context_parallel(
    model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims, collectives: Collectives
) -> None:
    """Let each attention see the whole sequence: gather k and v, exchange heads, or both."""
    degree = dims.ulysses_degree or 1
    over = mesh["cp_outer", "ulysses"] if 1 < degree < dims.cp else mesh["cp"]
    style = ContextParallel(
        seq_dim=2,
        head_dim=1,
        ulysses_degree=degree,
        layout=sequence_layout(mesh),
        collectives=collectives,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            parallelize_module(module.core, over, style)


def sequence_layout(mesh: ParallelMesh | None) -> Contiguous | Zigzag:
    """Return how sequences lie over ``cp``: early and late parts paired, so that work is even."""
    return Contiguous() if mesh is None or mesh["cp"].size() == 1 else Zigzag()


def recompute_blocks(model: LanguageModel) -> None:
    """Keep each block's input only and compute the rest again in backward."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def apply_fully_shard(model: LanguageModel, mesh: ParallelMesh, collectives: Collectives) -> None:
    """Shard what is left: experts over ``efsdp``, the rest over ``fsdp``, and sum gradients.

    Where ``fsdp`` leaves ``cp`` out, ``replicate`` has it: ranks that saw other parts of a sequence
    then hold replicas. Else it is ``dp_replicate``.
    """
    dense, sparse = mesh["replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    units: list[tuple[nn.Module, DeviceMesh]] = [
        (block.mlp.experts, sparse) for block in model.blocks if isinstance(block.mlp, MoE)
    ]
    units += [(block, dense) for block in model.blocks]
    for module, over in [*units, (model, dense)]:
        # Losses are shares of one mean already: a mean would scale experts and the rest unlike.
        fully_shard(module, over, gradient_reduction="sum", collectives=collectives)
