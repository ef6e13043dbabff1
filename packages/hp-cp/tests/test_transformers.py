"""A Llama of Hugging Face trains with its attention replaced through that library's registry."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_cp import (
    Contiguous,
    Greedy,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    context_parallel_attention,
    cp_loss,
    position_ids,
    shard_sequence,
    shift_labels,
)
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh

transformers = pytest.importorskip("transformers")

SEQ_LEN = 61
STEPS = 3
DOCUMENTS = MaskSpec(causal=True, cu_seqlens=(0, 7, 8, 30, 61))
Curve = tuple[list[float], list[dict[str, Tensor]]]


def attention_of(mesh: DeviceMesh, mask: MaskSpec, layout: Layout, options: dict[str, Any]) -> Any:
    """Return an attention as the registry wants it, over the ranks of ``mesh``."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **other: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None
        assert dropout == 0.0
        out = context_parallel_attention(
            query,
            key,
            value,
            mesh,
            mask=mask,
            layout=layout,
            scale=scaling,
            seq_len=SEQ_LEN,
            **options,
        )
        return out.transpose(1, 2), None

    return attention


def llama(attention: str) -> nn.Module:
    """Return a small model in float64, the same on every rank and in every process."""
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).double().train()
    return model


def tokens() -> Tensor:
    return torch.randint(50, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, loss_of: Any, reduce: Any) -> Curve:
    """Return losses and gradients of some steps of plain gradient descent."""
    losses, gradients = [], []
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        loss = reduce([loss.detach().clone(), *grads.values()])
        losses.append(loss)
        gradients.append({name: grad.clone() for name, grad in grads.items()})
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.5)
                parameter.grad = None
    return losses, gradients


def on_rank(rank: int, n: int, mask: MaskSpec, layout: Layout, options: dict[str, Any]) -> Curve:
    """Train on this rank's part of the sequence."""
    mesh = cp_mesh(n)
    name = "ours"
    transformers.AttentionInterface.register(name, attention_of(mesh, mask, layout, options))
    transformers.AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    model = llama(name)
    whole = tokens()
    labels = shift_labels(whole, mask)
    mine, labels = shard_sequence((whole, labels), mesh, layout, 1, mask)
    positions = position_ids(mesh, layout, SEQ_LEN, mask)

    def loss_of() -> Tensor:
        logits = model(mine, position_ids=positions[None], use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return cp_loss(total, (labels != -100).sum(), mesh)

    def reduce(tensors: list[Tensor]) -> float:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
        return tensors[0].item()

    return trained(model, loss_of, reduce)


def alone(mask: MaskSpec) -> Curve:
    """Train in one process with torch's attention, each document by itself."""
    model = llama("sdpa")
    whole = tokens()

    def loss_of() -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for document in mask.documents(SEQ_LEN):
            part = whole[:, document.start : document.stop]
            logits = model(part, use_cache=False).logits[:, :-1]
            targets = part[:, 1:]
            total = total + F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            count += targets.numel()
        return total / count

    return trained(model, loss_of, lambda tensors: tensors[0].item())


@pytest.mark.parametrize("mask", [MaskSpec(causal=True), DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Zigzag(), {"schedule": "direct"}),
        (PerDocument(), {"schedule": "ring"}),
        (Greedy(4), {"schedule": "gather"}),
        (Contiguous(), {"ulysses_degree": 2}),
    ],
    ids=["direct", "ring", "gather", "ulysses"],
)
def test_losses_and_gradients_of_a_llama_are_those_of_one_process(
    ranks: Any, mask: MaskSpec, layout: Layout, options: dict[str, Any]
) -> None:
    losses, gradients = alone(mask)
    answers = ranks(2).run(on_rank, 2, mask, layout, options)
    for ours, found in answers:
        assert losses[-1] < losses[0]
        torch.testing.assert_close(ours, losses, rtol=1e-12, atol=0)
        for step, expected in zip(found, gradients, strict=True):
            assert step.keys() == expected.keys()
            for name, grad in step.items():
                torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)


def test_outputs_and_batches_of_the_library_keep_their_type_and_are_not_changed() -> None:
    x = torch.arange(8)[None]
    batch = transformers.BatchEncoding({"input_ids": x, "n": 3})
    output = transformers.utils.ModelOutput(input_ids=x)
    mesh = SimulatedCollectives(SimulatedWorld(2), 1).mesh((2,), ("cp",))
    for tree in (batch, output):
        mine = shard_sequence(tree, mesh, Contiguous(), 1)
        assert type(mine) is type(tree)
        assert torch.equal(mine["input_ids"], x[:, 4:])
        assert tree["input_ids"] is x
