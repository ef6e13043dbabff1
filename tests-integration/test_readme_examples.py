"""Fragments in READMEs and documentation pages, run with test models on several ranks.

Whole examples run as printed, by ``tools/examples.py``. Fragments leave out the model or the data,
which these tests provide.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from fragments import fragment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hp_cp
from hp_cp import Zigzag, shard_sequence
from hp_cp.transformers import context_parallel, shard_batch
from hp_ep import ExpertParallel, MoE, parallelize_experts
from hp_fsdp import fully_shard

transformers = pytest.importorskip("transformers")


class Core(nn.Module):
    """A module with the arguments of ``scaled_dot_product_attention``."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def model_with_core() -> nn.Module:
    """Return a model with the core-attention module that the example names."""
    attention = nn.ModuleDict({"core": Core()})
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": attention})])})


def attend(model: nn.Module, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output of the model's core and the gradients of what it got."""
    given = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    core = model.get_submodule("layers.0.attention.core")
    out = core(*given, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def on_rank(rank: int, source: str, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Run the example, then the module that it names, on this rank's rows."""
    model, mesh = model_with_core(), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    exec(source, {**vars(hp_cp), "ContextParallel": hp_cp.ContextParallel, **locals()})
    return attend(model, *shard_sequence(tensors, mesh, Zigzag(), seq_dim=2))


def test_the_style_of_hp_cp_gives_the_attention_of_one_process(ranks: Any) -> None:
    source = fragment("hp-cp", "ContextParallel(")
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 2, 4, 16, 8, dtype=torch.float64)
    expected = attend(model_with_core(), q, k, v, grad)
    answers = ranks(2).run(on_rank, source, (q, k, v, grad))
    for held, results in zip(Zigzag().indices(2, 16), answers, strict=True):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference[:, :, list(held)], rtol=0, atol=1e-13)


def small_llama() -> Any:
    """Return a small model of transformers, the same in every process."""
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().train()


def preferences() -> dict[str, Tensor]:
    """Return two chosen and two rejected answers to prompts of three tokens."""
    ids = torch.randint(50, (4, 23), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(23) < 3, -100)
    reference = torch.tensor([-80.0, -75.0, -79.0, -81.0], dtype=torch.float64)
    return {"ids": ids, "labels": labels, "reference": reference}


def preferred_on_rank(rank: int, source: str) -> dict[str, list[Tensor]]:
    """Run the example; return the loss and all gradients for three ways to reduce them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    averaged = source.replace("replicated_loss=True", "replicated_loss=False")
    assert averaged != source
    found: dict[str, list[Tensor]] = {}
    reductions: tuple[Literal["all_reduce", "sum", "mean"], ...] = ("all_reduce", "sum", "mean")
    for reduction in reductions:
        model = context_parallel(small_llama(), mesh["cp"], layout=Zigzag())
        if reduction != "all_reduce":
            for layer in model.model.layers:
                fully_shard(layer, mesh["cp"], gradient_reduction=reduction)
            fully_shard(model, mesh["cp"], gradient_reduction=reduction)
        names: dict[str, Any] = {"mesh": mesh, "model": model, **preferences()}
        names["shard_batch"] = shard_batch
        exec(averaged if reduction == "mean" else source, names)
        grads = [parameter.grad for parameter in model.parameters()]
        if reduction == "all_reduce":
            for grad in grads:
                torch.distributed.all_reduce(grad, group=mesh["cp"].get_group())
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        found[reduction] = [names["loss"].detach(), *whole]
    return found


def test_the_preference_loss_of_hp_cp_has_the_gradients_of_one_process(ranks: Any) -> None:
    source = fragment("hp-cp", "replicated_loss=")
    model, given = small_llama(), preferences()
    logits = model(input_ids=given["ids"], use_cache=False).logits[:, :-1]
    targets = given["labels"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    sums = (log_probs * (targets != -100)).sum(1) - given["reference"]
    loss = -F.logsigmoid(0.1 * (sums[:2] - sums[2:])).mean()
    loss.backward()
    expected = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for answer in ranks(2).run(preferred_on_rank, source):
        assert list(answer) == ["all_reduce", "sum", "mean"]
        for found in answer.values():
            for result, reference in zip(found, expected, strict=True):
                torch.testing.assert_close(result, reference, rtol=0, atol=1e-10)


def model_with_experts() -> nn.Module:
    """Return a model with two mixture-of-experts layers."""
    torch.manual_seed(0)
    layers = [MoE(8, 12, 8, 2, num_shared_experts=1, dtype=torch.float64) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Linear(8, 8, dtype=torch.float64), layers[1])


def experts_on_rank(rank: int, sources: tuple[str, str], x: Tensor) -> list[Tensor]:
    """Run the two examples, a step between them; return all gradients, whole."""
    names: dict[str, Any] = {"model": model_with_experts()}
    exec(sources[0], names)
    names["model"](x.chunk(4)[rank]).square().sum().backward()
    exec(sources[1], names)
    grads = [parameter.grad for parameter in names["model"].parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def test_the_sum_of_hp_ep_gives_the_gradients_of_one_process(ranks: Any) -> None:
    style = fragment("hp-ep", "ExpertParallel(", "init_device_mesh(")
    total = fragment("hp-ep", "all_reduce(")
    model, x = model_with_experts(), torch.randn(12, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    for grads in ranks(4).run(experts_on_rank, (style, total), x):
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-11)


class Block(nn.Module):
    """A dense layer and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8, dtype=torch.float64)
        self.moe = MoE(8, 12, 4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many tokens."""
        y: Tensor = x + self.moe(self.dense(x))
        return y


class Blocks(nn.Module):
    """A model with the blocks that the example names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many tokens."""
        for block in self.blocks:
            x = block(x)
        return x


def sharded_on_rank(rank: int, source: str, x: Tensor, y: Tensor) -> list[Tensor]:
    """Run the example on this rank's tokens; return all gradients, whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    names: dict[str, Any] = dict(
        model=Blocks(),
        mesh=mesh,
        x=x.chunk(4)[rank],
        y=y.chunk(4)[rank],
        number_of_tokens_of_all_ranks=len(x),
        parallelize_experts=parallelize_experts,
        ExpertParallel=ExpertParallel,
    )
    exec(source, names)
    grads = [parameter.grad for parameter in names["model"].parameters()]
    return [g.full_tensor() for g in grads if isinstance(g, DTensor)]


def test_the_sharded_model_of_hp_ep_steps_as_one_process(ranks: Any) -> None:
    source = fragment("hp-ep", "fully_shard(")
    model = Blocks()
    x, y = 5 * torch.randn(2, 12, 8, dtype=torch.float64)
    ((model(x) - y).square().sum() / len(x)).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
    for grads in ranks(4).run(sharded_on_rank, source, x, y):
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-11)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)))


def trained_on_rank(rank: int, source: str, batches: Tensor, folder: str) -> list[Tensor]:
    """Run the loop on this rank's batches; return all parameters, loaded again, whole."""
    model = layers()
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    fully_shard(model, init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "batches": batches[rank], "folder": folder}
    before, after = source.split("# later")
    exec(before, names)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    exec("# " + after, names)
    return [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]


def test_the_loop_of_hp_fsdp_trains_as_one_process(ranks: Any, tmp_path: Path) -> None:
    source = fragment("hp-fsdp", "set_requires_gradient_sync(")
    batches = torch.randn(2, 2, 3, 4, 8, dtype=torch.float64)  # ranks, steps, microbatches
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        for x in batches[:, step].flatten(0, 1):
            (model(x).pow(2).mean() / 6).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(2).run(trained_on_rank, source, batches, str(tmp_path)):
        for parameter, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected.detach(), rtol=0, atol=1e-11)


def hugging_face_model() -> Any:
    """Return a small model of transformers, the same in every process."""
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).double()


def hugging_face_on_rank(rank: int, sources: tuple[str, str], ids: Tensor) -> list[Tensor]:
    """Run the example, then the sum of the other one; return the share and all gradients, whole."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    names: dict[str, Any] = {"mesh": mesh, "model": hugging_face_model(), "ids": ids.chunk(2)[rank]}
    exec(sources[0], names)
    exec(sources[1], names)
    grads = [parameter.grad for parameter in names["model"].parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
    return [names["loss"].detach(), *whole]


def test_three_lines_of_hp_ep_give_a_share_and_the_gradients_of_one_process(
    ranks: Any,
) -> None:
    shared = fragment("hp-ep", "hp_ep.transformers")
    total = fragment("hp-ep", "all_reduce(")
    model, ids = hugging_face_model(), torch.randint(50, (4, 9))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    shares = []
    for share, *grads in ranks(2).run(hugging_face_on_rank, (shared, total), ids):
        shares.append(share)
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-7)
    torch.testing.assert_close(sum(shares), loss.detach(), rtol=1e-6, atol=0)
