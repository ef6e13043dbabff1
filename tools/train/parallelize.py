"""Spread a model over a mesh: each axis in a few lines, in the one order that composes."""

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
from .hugging_face import forward_alone, spread_attention, spread_experts, spread_layers
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
    """Spread ``model`` over all axes of ``mesh``, in place; return how it is called.

    Every rank gives the same whole model and keeps its parts; nothing is communicated, but one
    element over context parallel groups on other devices than a CPU. Gradients are summed over
    ranks, so a rank's loss is its share of the whole batch's. ``collectives`` takes all traffic but
    that of torch's tensor parallel styles. ``compiler`` compiles each block; with ``compute_dtype``
    weights are gathered in it, and kept, their gradients summed, in their own.
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
            spread_layers(model, mesh["tp"], plan)
        experts = spread_experts(model, mesh["ep"], mesh["loss"], collectives=carrier)
        forward = forward_alone
        if dims.cp > 1:
            forward = spread_attention(
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
    # Every rank holds the same values already: no need to send them.
    tied = model.config.tie_word_embeddings
    parallelize_module(model, tp, plan, src_data_rank=None)
    if tied and model.head is not None and model.embedding is not None:  # cut alike, each apart
        model.head.weight = model.embedding.weight


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
    for block in model.blocks.values():
        if isinstance(block.mlp, MoE):
            parallelize_module(block.mlp, over, style)


def apply_context_parallel(
    model: LanguageModel, mesh: ParallelMesh, dims: ParallelDims, collectives: Collectives
) -> None:
    """Let each attention see the whole sequence: gather k and v, exchange heads, or both."""
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
    """Return how sequences lie over ``cp``: early and late parts paired, so that work is even."""
    return Contiguous() if mesh is None or mesh["cp"].size() == 1 else Zigzag()


def sequence_mesh(mesh: ParallelMesh, dims: ParallelDims) -> DeviceMesh:
    """Return the ranks that share a sequence: a mesh of two axes where some exchange heads."""
    some = 1 < (dims.ulysses_degree or 1) < dims.cp
    return mesh["cp_outer", "ulysses"] if some else mesh["cp"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the built-in model or of one of transformers, in their order."""
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
    """Compile blocks, or keep their inputs only and compute the rest again in backward, or both."""
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
    """Shard what is left: ``experts`` over ``efsdp``, the rest over ``fsdp``, and sum gradients.

    Where ``fsdp`` leaves ``cp`` out, ``replicate`` has it: ranks that saw other parts of a sequence
    then hold replicas. Else it is ``dp_replicate``.
    """
    dense, sparse = mesh["replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    blocks = blocks_of(model)
    units: list[tuple[nn.Module, DeviceMesh]] = [(each, sparse) for each in experts]
    units += [(block, dense) for block in blocks]
    if isinstance(model, LanguageModel) and len(blocks) < model.config.num_hidden_layers:
        # A rank may have several stages: what is theirs alone is sharded where all can find it.
        units += [(end, dense) for end in (model.embedding, model.norm, model.head) if end]
    for module, over in [*units, (model, dense)]:
        fully_shard(
            module,
            over,
            collectives=collectives,
            # Losses are shares of one mean: another mean would scale experts and the rest unlike.
            gradient_reduction="sum",
            mp_policy=MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32
            ),
        )
