"""The arms of a case: hp, the peer, and the computation without communication.

All arms start from the same weights, and train on the same batches with the trainer's AdamW and
clipping. The loss of a rank is the sum over its tokens, divided by the number of tokens of all
ranks. So gradients are summed over the ranks.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from train.data import IGNORED
from train.loop import make_optimizer
from train.model import LanguageModel
from train.parallelize import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_tensor_parallel,
)

from hp_cp import Zigzag
from hp_dtensor import TorchCollectives, clip_grad_norm_
from hp_ep import MoE
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims, ParallelMesh

from . import peer
from .cases import BATCHES, TRAIN, Case, batches, count_of

Part = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HpSettings:
    """Settings of the hp arm. The defaults equal the trainer's settings.

    Attributes:
        name: Name in the report.
        options: Options of `hp_fsdp.fully_shard` for all units.
        separate_ends: Shard the embedding as one unit, and the last norm and the head as another
            one. Otherwise they are in the root unit.
        ulysses_degree: Number of ranks that exchange heads for context parallelism. 1 gathers keys
            and values.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    separate_ends: bool = False
    ulysses_degree: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """Settings of the peer.

    Attributes:
        name: Name in the report.
        separate_ends: As in `HpSettings`. The unit of the norm and the head is not resharded.
        explicit_prefetch: Prefetch the next unit in forward and the previous one in backward, start
            all-gathers of the current unit asynchronously, and do not reshard the last block.
        experts_in_fsdp: If True, the experts are units of their own over the ranks that hold the
            same experts (one rank in these cases). If False, they are not sharded.
        optimizer: Implementation of AdamW.
        rotate: How ring attention passes keys and values on.
    """

    name: str
    separate_ends: bool = True
    explicit_prefetch: bool = True
    experts_in_fsdp: bool = True
    optimizer: Literal["fused", "foreach"] = "fused"
    rotate: Literal["ALL_GATHER", "ALL_TO_ALL"] = "ALL_GATHER"


Settings = HpSettings | TorchSettings


def candidates(case: Case) -> dict[str, Sequence[Settings]]:
    """Return the settings of each side. The fastest of each are measured."""
    ours = [
        HpSettings(name="trainer"),
        HpSettings(name="separate ends", separate_ends=True),
        HpSettings(name="accumulate", options={"grads": "accumulate"}),
    ]
    theirs = [
        TorchSettings(name="tuned"),
        TorchSettings(name="tuned, foreach", optimizer="foreach"),
        TorchSettings(name="torchtitan's", explicit_prefetch=False),
        TorchSettings(name="defaults", explicit_prefetch=False, separate_ends=False),
    ]
    if case.model == "MoE":
        theirs += [
            TorchSettings(name="tuned, experts outside FSDP", experts_in_fsdp=False),
            TorchSettings(
                name="defaults, experts outside FSDP",
                explicit_prefetch=False,
                separate_ends=False,
                experts_in_fsdp=False,
            ),
        ]
    if case.tp == 1:
        ragged = {"layout": "ragged"}
        ours.append(HpSettings(name="ragged", options=ragged))
        ours.append(HpSettings(name="ragged, separate ends", options=ragged, separate_ends=True))
        accumulate = ragged | {"grads": "accumulate"}
        ours.append(HpSettings(name="ragged, accumulate", options=accumulate))
    if case.cp > 1:
        ours.append(HpSettings(name="Ulysses", ulysses_degree=case.cp))
        theirs.append(TorchSettings(name="tuned, all-to-all", rotate="ALL_TO_ALL"))
    return {"hp": ours, "torch": theirs}


class Arm:
    """A model that takes training steps on the parts of the batches of one rank.

    Args:
        name: ``"hp"``, ``"torch"``, or the name of a computation.
        settings: All settings, for the report.
        model: Called with tokens and positions, returns logits.
        parts: Tokens and labels of this rank in each batch.
        positions: Positions of this rank's tokens in their samples.
        count: Number of labels of a batch, of all ranks.
        clip: Clips the gradients and returns their norm.
        optimizer: Updates the parameters.
        zero_grad: Drops the gradients. Defaults to ``optimizer.zero_grad``.

    Attributes:
        batch: Number of the batch of the current or latest step.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        model: nn.Module,
        parts: Sequence[Part],
        positions: Tensor,
        count: int,
        clip: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer,
        zero_grad: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.model = model
        self._parts = parts
        self._positions = positions
        self._count = count
        self._clip = clip
        self._optimizer = optimizer
        self._zero_grad = optimizer.zero_grad if zero_grad is None else zero_grad
        self._steps = 0
        self.batch = 0

    def freeze(self) -> None:
        """Set the learning rate to 0, so that experts receive the same rows in each later step."""
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0

    def step(self, number: int | None = None) -> tuple[Tensor, Tensor]:
        """Take one step: forward, backward, clip, update, drop the gradients.

        Args:
            number: Number of the step, which chooses the batch. Defaults to None: the next one.

        Returns:
            This rank's part of the loss, and the norm of all gradients before clipping.
        """
        if number is None:
            number, self._steps = self._steps, self._steps + 1
        self.batch = number % len(self._parts)
        tokens, labels = self._parts[self.batch]
        logits = self.model(tokens, self._positions)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / self._count
        loss.backward()
        norm = self._clip()
        self._optimizer.step()
        self._zero_grad()
        return loss.detach(), norm


def parts_of(case: Case, rank: int, device: torch.device) -> tuple[list[Part], Tensor]:
    """Return a rank's tokens and labels of each batch, and the positions of its tokens.

    Ranks are ordered as ``[dp, cp, tp]``. Sequences are sharded over ``cp`` in zigzag order, which
    is the order of both sides.
    """
    dp_index, cp_index = rank // (case.tp * case.cp), rank // case.tp % case.cp
    positions = torch.arange(case.seq_len)
    if case.cp > 1:
        positions = torch.tensor(list(Zigzag().indices(case.cp, case.seq_len)[cp_index]))
    found = []
    for batch in batches(case):
        tokens, labels = (x.chunk(case.dp)[dp_index][:, positions] for x in batch)
        found.append((tokens.contiguous().to(device), labels.contiguous().to(device)))
    return found, positions.to(device)


def make_arm(
    base: LanguageModel, case: Case, settings: Settings, rank: int, device: torch.device
) -> Arm:
    """Return an arm with these settings."""
    if isinstance(settings, HpSettings):
        return hp_arm(base, case, settings, rank, device)
    return torch_arm(base, case, settings, rank, device)


@cache
def hp_mesh(case: Case, ulysses_degree: int, device_type: str) -> ParallelMesh:
    """Return the mesh of the hp arms."""
    return ParallelDims(
        dp_shard=case.dp,
        tp=case.tp,
        cp=case.cp,
        ep=case.ep,
        ulysses_degree=ulysses_degree if ulysses_degree > 1 else None,
        world_size=case.ranks,
    ).build_mesh(device_type)


def hp_arm(
    base: LanguageModel, case: Case, settings: HpSettings, rank: int, device: torch.device
) -> Arm:
    """Return the model with hp's FSDP, context parallelism and expert parallelism.

    Tensor parallelism is torch's, as in the trainer.
    """
    mesh = hp_mesh(case, settings.ulysses_degree, device.type)
    found = mesh["batch"].get_local_rank(), mesh["cp"].get_local_rank()
    if found != (rank // (case.tp * case.cp), rank // case.tp % case.cp):
        raise RuntimeError(f"rank {rank} of {case.name} has coordinates {found}")
    model, carrier = copy.deepcopy(base), TorchCollectives()
    if case.tp > 1:
        apply_tensor_parallel(model, mesh, mesh.dims)
    apply_expert_parallel(model, mesh, mesh.dims, carrier)
    if case.cp > 1:
        apply_context_parallel(model, mesh, mesh.dims, carrier)
    _shard_with_hp(model, mesh, settings)
    optimizer = make_optimizer(model, TRAIN)
    parameters = list(model.parameters())
    parts, positions = parts_of(case, rank, device)
    return Arm(
        "hp",
        asdict(settings) | {"AdamW": "fused, sharded_optimizer"},
        model,
        parts,
        positions,
        count_of(batches(case)[0][1]),
        lambda: clip_grad_norm_(parameters, TRAIN.max_norm),
        optimizer,
    )


def _shard_with_hp(model: LanguageModel, mesh: ParallelMesh, settings: HpSettings) -> None:
    """Shard the units of the trainer; see `train.parallelize.apply_fully_shard`."""
    dense, sparse = mesh["replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    options: dict[str, Any] = {"gradient_reduction": "sum", **settings.options}
    for layer in [module for module in model.modules() if isinstance(module, MoE)]:
        fully_shard(layer.experts, sparse, **options)
    for block in model.blocks.values():
        fully_shard(block, dense, **options)
    if settings.separate_ends:
        embedding, norm, head = ends_of(model)
        fully_shard(embedding, dense, **options)
        fully_shard([norm, head], dense, reshard_after_forward=False, **options)
    fully_shard(model, dense, **options)


def ends_of(model: LanguageModel) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return the embedding, the last norm and the head."""
    ends = model.embedding, model.norm, model.head
    if None in ends:
        raise ValueError("the model is a stage of a pipeline")
    return cast(tuple[nn.Module, nn.Module, nn.Module], ends)


@cache
def torch_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of torch with these axes."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@cache
def _flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the flattened mesh. If it exists, DTensor reduces over all axes with one call."""
    return mesh._flatten()


def torch_arm(
    base: LanguageModel, case: Case, settings: TorchSettings, rank: int, device: torch.device
) -> Arm:
    """Return the model with torch's FSDP2, tensor and context parallelism, and torchtitan's MoE."""
    model = copy.deepcopy(base)
    sparse: DeviceMesh | None = None
    if case.tp > 1:
        mesh = torch_mesh(device.type, (case.dp, case.tp), ("fsdp", "tp"))
        dims = ParallelDims(dp_shard=case.dp, tp=case.tp, world_size=case.ranks)
        apply_tensor_parallel(model, cast(Any, mesh), dims)  # reads mesh["tp"] only
        dense = mesh["fsdp"]
        _flat_mesh(mesh)
    elif case.cp > 1:
        mesh = torch_mesh(device.type, (case.dp, case.cp), ("dp", "cp"))
        dense = _flat_mesh(mesh)
        peer.use_ring_attention(model, mesh["cp"].get_group(), settings.rotate)
    else:
        dense = torch_mesh(device.type, (case.dp,), ("fsdp",))
    if case.ep > 1:
        both = torch_mesh(device.type, (1, case.ep), ("efsdp", "ep"))
        sparse = both["efsdp"]
        _flat_mesh(both)
        peer.use_torchtitan(model, both["ep"])
    elif case.model == "MoE":
        peer.use_torchtitan(model, None)
    _shard_with_torch(model, dense, sparse, settings)
    optimizer = peer.adamw(model, settings.optimizer)
    parts, positions = parts_of(case, rank, device)
    return Arm(
        "torch",
        asdict(settings),
        model,
        parts,
        positions,
        count_of(batches(case)[0][1]),
        peer.clipping(model),
        optimizer,
    )


def _shard_with_torch(
    model: LanguageModel, dense: DeviceMesh, sparse: DeviceMesh | None, settings: TorchSettings
) -> None:
    """Shard the embedding, each block, and the norm with the head, as torchtitan does.

    Gradients are summed. With separate ends, the root unit has no parameters.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as shard

    blocks = list(model.blocks.values())
    experts = [peer.experts_of(block) for block in blocks]
    ignored: set[nn.Parameter] = set()
    for module in experts:
        if module is None or sparse is None:
            continue  # without expert parallelism, experts belong to the unit of their block
        if settings.experts_in_fsdp:
            shard(module, mesh=sparse)
        else:
            ignored |= set(module.parameters())
    for number, block in enumerate(blocks):
        last = settings.explicit_prefetch and number == len(blocks) - 1
        shard(block, mesh=dense, reshard_after_forward=not last, ignored_params=ignored)
    embedding, norm, head = ends_of(model)
    if settings.separate_ends:
        shard(embedding, mesh=dense)
        shard([norm, head], mesh=dense, reshard_after_forward=False)
    shard(model, mesh=dense, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no operation that multiplies before it adds.
            module.set_force_sum_reduction_for_comms(True)
    if settings.explicit_prefetch:
        _prefetch(model, [embedding, *blocks, norm] if settings.separate_ends else blocks)


def _prefetch(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Prefetch the next unit in forward, and the previous one in backward.

    The experts of a block are a unit of their own if they are sharded.
    """
    from torch.distributed.fsdp import FSDPModule

    cast(Any, model)._set_unshard_async_op(True)
    units: list[list[Any]] = []
    for module in modules:
        inner: Any = peer.experts_of(module)
        units.append([module, inner] if isinstance(inner, FSDPModule) else [module])
    for before, after in itertools.pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before[::-1])


def plain_arm(base: LanguageModel, case: Case, device: torch.device) -> Arm:
    """Return the model in one process, on all tokens of each batch."""
    model = copy.deepcopy(base)
    parts = [(tokens.to(device), labels.to(device)) for tokens, labels in batches(case)]
    return Arm(
        "one process",
        {},
        model,
        parts,
        torch.arange(case.seq_len, device=device),
        count_of(parts[0][1]),
        peer.clipping(model),
        peer.adamw(model, "foreach"),
    )


ExpertRows = list[list[list[int]]]  # rows of each local expert, by batch and layer


def received_rows(arm: Arm) -> ExpertRows:
    """Return how many rows each local expert receives; takes one step per batch."""
    found: ExpertRows = [[] for _ in range(BATCHES)]

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        found[arm.batch].append(given[1].tolist())

    layers = [module for module in arm.model.modules() if isinstance(module, MoE)]
    hooks = [layer.experts.register_forward_pre_hook(note) for layer in layers]
    for number in range(BATCHES):
        arm.step(number)
    for hook in hooks:
        hook.remove()
    return found


def compute_arm(
    base: LanguageModel,
    case: Case,
    rank: int,
    device: torch.device,
    rows: ExpertRows | None = None,
) -> Arm:
    """Return the computation of one rank without communication.

    The model is local to the rank, has no DTensor, and sends nothing. It differs from the model of
    one process as follows.

    - FSDP: the model has all parameters. The clipping and AdamW (fused) run on two flat tensors,
      with weight decay and without, with as many elements as the shards of this rank.
    - ``tp``: each matrix is this rank's shard. An all-gather is replaced by copies of the own
      input, and a reduce-scatter by its first part.
    - ``cp``: attention takes this rank's queries, keys and values, without a mask. With two
      ranks, this takes as many multiplications as the causal mask leaves per rank.
    - ``ep``: this rank's experts compute as many rows as they receive in the sharded model. The
      rows are copies of the rank's own tokens.

    Args:
        base: The whole model.
        case: The case.
        rank: Rank of this process.
        device: Device of the model.
        rows: Result of `received_rows`. Defaults to None: each expert has the mean.
    """
    model = _local_model(base, case, rows).to(device)
    experts = [module for module in model.modules() if isinstance(module, _LocalMoE)]
    shards = _flat_shards(model, case)
    rest = {"lr": TRAIN.learning_rate, "betas": TRAIN.betas, "fused": True}
    decays = (TRAIN.weight_decay, 0.0)
    groups = [
        {"params": [p], "weight_decay": decay} for p, decay in zip(shards, decays, strict=True)
    ]
    parts, positions = parts_of(case, rank, device)
    arm = Arm(
        "compute",
        {},
        model,
        parts,
        positions,
        count_of(batches(case)[0][1]),
        lambda: torch.nn.utils.clip_grad_norm_(shards, TRAIN.max_norm),
        torch.optim.AdamW(groups, **cast(Any, rest)),
        model.zero_grad,
    )
    for layer in experts:
        layer.arm = arm
    return arm


def _flat_shards(model: nn.Module, case: Case) -> list[nn.Parameter]:
    """Return flat parameters with gradients, of the sizes of a rank's shards."""
    sizes = [0, 0]
    for name, parameter in model.named_parameters():
        ranks = 1 if "experts" in name else case.fsdp
        sizes[parameter.ndim < 2] += -(-parameter.numel() // ranks)
    device = next(model.parameters()).device
    found = [nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def _local_model(base: LanguageModel, case: Case, rows: ExpertRows | None) -> LanguageModel:
    model = copy.deepcopy(base)
    blocks: list[Any] = [b for b in model.blocks.values() if isinstance(b.mlp, MoE)]
    for number, block in enumerate(blocks):
        own = None if rows is None else [of_batch[number] for of_batch in rows]
        block.mlp = _LocalMoE(block.mlp, case, own)
    if case.tp > 1:
        _keep_local_matrices(model, case.tp)
    if case.cp > 1:
        if case.cp != 2:
            raise ValueError(f"cp={case.cp}: only with 2 is the local attention without a mask")
        for block in model.blocks.values():
            cast(Any, block).attention.core = _LocalAttention()
    return model


class _LocalAttention(nn.Module):
    """Attention of a rank's queries to its own keys and values, without a mask."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool
    ) -> Tensor:
        """Return attention of ``[batch, heads, seq, head_dim]``."""
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)


class _LocalMoE(nn.Module):
    """Stands in for a mixture of experts on one rank.

    The rank's experts compute as many rows as they receive in the sharded model. The rows are
    copies of the rank's own tokens.

    Args:
        layer: The whole layer.
        case: The case.
        rows: Rows of each local expert in each batch. None: each expert has the mean.

    Attributes:
        arm: The arm of the layer, which knows the batch.
    """

    arm: Arm

    def __init__(self, layer: MoE, case: Case, rows: list[list[int]] | None) -> None:
        super().__init__()
        number = layer.router.num_experts // case.ep
        self.router = layer.router
        self.experts = MoE(layer.dim, layer.experts.hidden_dim, number, layer.router.top_k).experts
        with torch.no_grad():
            for own, whole in zip(
                self.experts.parameters(), layer.experts.parameters(), strict=True
            ):
                own.copy_(whole[:number])
        assignments = case.tokens // case.ranks * layer.router.top_k
        mean = [[assignments // number] * number] * BATCHES
        self._counts = [torch.tensor(each) for each in rows or mean]

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the experts, summed per token, ``[batch, seq, dim]``."""
        tokens = x.flatten(0, 1)
        weights, _ = self.router(tokens)
        counts = self._counts[self.arm.batch]
        rows = sum(counts.tolist())
        copies = -(-rows // len(tokens))
        each = tokens.repeat(copies, 1)[:rows]
        row_weights = weights.flatten().repeat(copies)[:rows]
        results = self.experts(each, counts.to(x.device), row_weights)
        padded = F.pad(results, (0, 0, 0, copies * len(tokens) - rows))
        return padded.view(copies, *tokens.shape).sum(0).view(x.shape)


def _keep_local_matrices(model: LanguageModel, tp: int) -> None:
    """Shard matrices as tensor parallelism does, and replace its communication by copies."""
    embedding, _, head = ends_of(model)
    for block in model.blocks.values():
        attention, mlp = cast(Any, block).attention, cast(Any, block).mlp
        for linear in (attention.wq, attention.wk, attention.wv, mlp.w1, mlp.w3):
            _keep_first(linear, tp, 0)
        for linear in (attention.wo, mlp.w2):
            _keep_first(linear, tp, 1)
        for module in (attention, mlp):
            module.register_forward_pre_hook(lambda _, args: (_gather(args[0], tp), *args[1:]))
            module.register_forward_hook(lambda _, args, output: _scatter(output, tp))
    _keep_first(embedding, tp, 0)
    _keep_first(head, tp, 0)
    rows = cast(Any, embedding).weight.shape[0]
    embedding.register_forward_pre_hook(lambda _, args: (args[0] % rows,))
    embedding.register_forward_hook(lambda _, args, output: _scatter(output, tp))
    head.register_forward_pre_hook(lambda _, args: (_gather(args[0], tp),))
    head.register_forward_hook(lambda _, args, output: _gather(output, tp, -1))


def _keep_first(module: Any, parts: int, dim: int) -> None:
    module.weight = nn.Parameter(module.weight.detach().chunk(parts, dim)[0].clone())


class _Gather(torch.autograd.Function):
    """Replaces an all-gather: concatenates ``parts`` copies of the input.

    Backward returns the first of ``parts`` chunks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, dim: int) -> Tensor:
        ctx.parts, ctx.dim = parts, dim
        return torch.cat([x] * parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(ctx.parts, ctx.dim)[0].contiguous(), None, None


class _Scatter(torch.autograd.Function):
    """Replaces a reduce-scatter: keeps the first of ``parts`` chunks.

    Backward concatenates copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, dim: int) -> Tensor:
        ctx.parts, ctx.dim = parts, dim
        return x.chunk(parts, dim)[0].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.cat([grads[0]] * ctx.parts, ctx.dim), None, None


def _gather(x: Tensor, parts: int, dim: int = 1) -> Tensor:
    return cast(Tensor, _Gather.apply(x, parts, dim))  # type: ignore[no-untyped-call]


def _scatter(x: Tensor, parts: int, dim: int = 1) -> Tensor:
    return cast(Tensor, _Scatter.apply(x, parts, dim))  # type: ignore[no-untyped-call]


def whole_loss(part: Tensor, case: Case) -> float:
    """Return the loss of the batch, from the parts of all ranks."""
    whole = part.detach().clone()
    dist.all_reduce(whole)
    return whole.item() / case.tp  # the ranks of tp have the same part


def number_of(norm: Tensor) -> float:
    """Return a norm, which may be a DTensor, as a number."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
