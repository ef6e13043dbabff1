"""A Llama of Hugging Face trains with hp_fsdp over the ranks between which hp_cp cuts sequences."""

from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_cp import InputError, Zigzag
from hp_cp.transformers import context_parallel, shard_batch
from hp_fsdp import fully_shard
from hp_mesh import ParallelDims

transformers = pytest.importorskip("transformers")

Step = tuple[Tensor, list[Tensor]]


def _model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double().train()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(50, (2, 37), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _mesh() -> DeviceMesh:
    return cached("cp", lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))


def _step(rank: int) -> Step:
    mesh = _mesh()["cp"]
    model = context_parallel(_model(), mesh, layout=Zigzag())
    model.activation_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mesh, gradient_reduction="sum")
    fully_shard(model, mesh, gradient_reduction="sum")
    loss = model(**shard_batch(_batch(), mesh, Zigzag())).loss
    loss.backward()
    share = loss.detach()
    torch.distributed.all_reduce(share)
    grads = []
    for p in model.parameters():
        assert isinstance(p.grad, DTensor)
        grads.append(p.grad.full_tensor())
    return share, grads


def _sharded_step(rank: int) -> dict[str, str]:
    """Return what a training step says whose parameters are sharded over meshes of each kind."""
    folded = cached("folded", lambda: ParallelDims(dp_shard=2, cp=2).build_mesh())
    apart = cached(
        "apart", lambda: ParallelDims(dp_shard=2, cp=2, fsdp_folds_cp=False).build_mesh()
    )
    cp, found = folded["cp"], {}
    for name, mesh, units in (
        ("layers over dp_shard", folded["dp_shard"], "layers"),
        ("model over dp_shard", folded["dp_shard"], "model"),
        ("layers over fsdp", folded["fsdp"], "layers"),
        ("model over fsdp", folded["fsdp"], "model"),
        ("layers over replicas and shards", apart["replicate", "fsdp"], "layers"),
    ):
        model = context_parallel(_model(), cp, layout=Zigzag())
        for layer in model.model.layers if units == "layers" else ():
            fully_shard(layer, mesh, gradient_reduction="sum")
        fully_shard(model, mesh, gradient_reduction="sum")
        try:
            model(**shard_batch(_batch(), cp, Zigzag())).loss.backward()
            found[name] = ""
        except InputError as error:
            found[name] = str(error)
    return found


def test_parameters_sharded_over_other_ranks_than_those_of_a_sequence_are_refused(
    ranks: Any,
) -> None:
    for found in ranks(4).run(_sharded_step):
        for name, message in found.items():
            assert ("do not hold the ranks that share its sequences" in message) is (
                "dp_shard" in name
            ), (name, message)


def test_shares_of_the_loss_and_summed_gradients_are_those_of_one_process(ranks: Any) -> None:
    model = _model()
    loss = model(**_batch()).loss
    loss.backward()
    for share, grads in ranks(2).run(_step):
        torch.testing.assert_close(share, loss.detach(), rtol=1e-6, atol=0)  # its loss is float32
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(grad, p.grad, rtol=0, atol=1e-10)
