"""Distribute a model over a mesh: one function per axis, called in the order that composes."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
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
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_mesh import ParallelDims, ParallelMesh

from .config import ModelError
from .hugging_face import distribute_experts, forward_alone, shard_attention, shard_layers
from .model import Attention, Forward, LanguageModel, call_built_in


def parallelize(
    model: nn.Module,
    mesh: ParallelMesh,
    dims: ParallelDims,
    *,
    collectives: Collectives | None = None,
    checkpoint_activations: bool = False,
    compiler: str | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Forward:
    """Distribute a model over all axes of a mesh, in place.

    Communicates nothing, except one element over context parallel groups on devices other than the
    CPU. Gradients are summed over ranks, so a rank's loss must be its part of the batch's mean.

    Args:
        model: The unsharded model, equal on all ranks. Each rank keeps its parts.
        mesh: The mesh of ``dims``.
        dims: The degrees.
        collectives: Used for all communication except that of torch's tensor parallel styles.
        checkpoint_activations: Recompute each block in backward.
        compiler: Backend that compiles each block, if any.
        compute_dtype: dtype to which weights are cast for computation. Sharded weights and sums of
            gradients keep their dtype.

    Returns:
        The function that calls the model.
    """
    carrier = TorchCollectives() if collectives is None else collectives
    forward: Forward = call_built_in
    experts: list[nn.Module]
    if isinstance(model, LanguageModel):
        if dims.tp > 1:
            apply_tensor_parallel(model, mesh, dims)
        apply_expert_parallel(model, mesh, dims, carrier)
        if dims.cp > 1:
            apply_context_parallel(model, mesh, dims, carrier)
        experts = [layer.experts for layer in model.modules() if isinstance(layer, MoE)]
    else:
        if dims.tp > 1:
            plan = cast(Any, model).config.base_model_tp_plan
            shard_layers(model, mesh["tp"], plan)
        experts = distribute_experts(model, mesh["ep"], mesh["loss"], collectives=carrier)
        forward = forward_alone
        if dims.cp > 1:
            forward = shard_attention(
                model,
                sequence_mesh(mesh, dims),
                sequence_layout(mesh),
                ulysses_degree=dims.ulysses_degree or 1,
                collectives=carrier,
            )
    change_blocks(model, recompute=checkpoint_activations, compiler=compiler)
    apply_fully_shard(model, experts, mesh, carrier, compute_dtype)
    return forward


def apply_tensor_parallel(model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims) -> None:
    """Shard matrices over ``tp`` with torch's styles; between them the sequence is sharded.

    Each rank has its part of the sequence in the residual stream (Korthikanti et al., arXiv
    2205.05198, section 4.2) and in a mixture of experts. If experts are sharded too (``etp``), each
    rank gets all tokens of its experts' layer.
    """
    tp = mesh["tp"]
    norm = SequenceParallel(use_local_output=True)
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    gather_first = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan: dict[str, ParallelStyle] = {
        **{name: style for name, style in ends.items() if name in dict(model.named_children())},
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
    for index, block in model.blocks.items():
        if isinstance(block.mlp, MoE):
            plan |= {f"blocks.{index}.mlp": whole} if dims.etp > 1 else {}
        else:
            plan |= {
                f"blocks.{index}.mlp": gather,
                f"blocks.{index}.mlp.w1": ColwiseParallel(),
                f"blocks.{index}.mlp.w3": ColwiseParallel(),
                f"blocks.{index}.mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
    # All ranks have the same values already, so nothing is sent.
    tied = model.config.tie_word_embeddings
    parallelize_module(model, tp, plan, src_data_rank=None)
    # Embedding and head were sharded separately.
    if tied and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight


def apply_expert_parallel(
    model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims, collectives: Collectives
) -> None:
    """Distribute experts over ranks. Loads are balanced over all tokens of the batch."""
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
    for block in model.blocks.values():
        if isinstance(block.mlp, MoE):
            parallelize_module(block.mlp, over, style)


def apply_context_parallel(
    model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims, collectives: Collectives
) -> None:
    """Compute attention over the whole sequence: all-gather k and v, exchange heads, or both."""
    style = ContextParallel(
        seq_dim=2,
        head_dim=1,
        ulysses_degree=dims.ulysses_degree or 1,
        layout=sequence_layout(mesh),
        collectives=collectives,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            parallelize_module(module.core, sequence_mesh(mesh, dims), style)


def sequence_layout(mesh: ParallelMesh | None) -> Contiguous | Zigzag:
    """Return the layout of sequences over ``cp``, which gives each rank the same work."""
    return Contiguous() if mesh is None or mesh["cp"].size() == 1 else Zigzag()


def sequence_mesh(mesh: ParallelMesh, dims: ParallelDims) -> DeviceMesh:
    """Return the mesh of ranks that share a sequence. It has two axes if some exchange heads."""
    some = 1 < (dims.ulysses_degree or 1) < dims.cp
    return mesh["cp_outer", "ulysses"] if some else mesh["cp"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the built-in model or of a transformers model, in order."""
    if isinstance(model, LanguageModel):
        return list(model.blocks.values())
    number = cast(Any, model).config.get_text_config().num_hidden_layers
    for module in cast(Any, model).base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return list(module)
    raise ModelError(
        f"a {type(model).__name__} has no list of its num_hidden_layers={number} layers, which are "
        "sharded one by one; use a model that has"
    )


def change_blocks(model: nn.Module, *, recompute: bool, compiler: str | None) -> None:
    """Compile blocks, or recompute their activations in backward, or both."""
    for block in blocks_of(model):
        if recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if compiler is not None:
            block.compile(backend=compiler)


def apply_fully_shard(
    model: nn.Module,
    experts: Sequence[nn.Module],
    mesh: ParallelMesh,
    collectives: Collectives,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shard experts over ``efsdp`` and all other parameters over ``fsdp``, and sum gradients.

    If ``fsdp`` does not contain ``cp``, ``replicate`` does, since ranks with other parts of a
    sequence then hold replicas. Else it is ``dp_replicate``.
    """
    dense, sparse = mesh["replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    blocks = blocks_of(model)
    units: list[tuple[nn.Module, DeviceMesh]] = [(each, sparse) for each in experts]
    units += [(block, dense) for block in blocks]
    if isinstance(model, LanguageModel) and len(blocks) < model.config.num_hidden_layers:
        # A rank may have several stages: shard the ends of the model as units of their own.
        units += [(end, dense) for end in (model.embedding, model.norm, model.head) if end]
    for module, over in [*units, (model, dense)]:
        fully_shard(
            module,
            over,
            collectives=collectives,
            # Losses are parts of one mean. Another mean would scale experts differently.
            gradient_reduction="sum",
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32
            ),
        )
