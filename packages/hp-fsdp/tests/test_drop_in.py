"""One training script for torch's second version, run with nothing but the import changed."""

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard

from hp_fsdp import fully_shard

from .models import Gradients, full

Ranks = Callable[[int], RankPool]
NAMES = (  # public names of both modules
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


class Model(nn.Module):
    """Four blocks, and a way in besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the input of the head."""
        return self.trunk(tokens)

    def trunk(self, tokens: Tensor) -> Tensor:
        """Run all but the head."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return cast(Tensor, self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return cast(Tensor, self.head(self.trunk(tokens)))


def script(fsdp: ModuleType, rank: int, folder: str) -> dict[str, Any]:
    """Train, save, load into another model, train on: with names of ``fsdp`` only."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    inner = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def build() -> tuple[Any, torch.optim.Optimizer]:
        with torch.device("meta"):
            model: Any = type("Own", (Model,), {})()  # a class that was never sharded before
        blocks = list(model.blocks)
        for position, block in enumerate(blocks):
            last = position == len(blocks) - 1
            fsdp.fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=not last)
        fsdp.fully_shard(
            model,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=fsdp.OffloadPolicy(),
            ignored_params=None,
        )
        for one, other in itertools.pairwise(blocks):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        fsdp.register_fsdp_forward_method(model, "features")
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            whole = torch.randn(p.shape, generator=generator) / 4
            local = torch.distributed.tensor.distribute_tensor(whole, mesh, p.placements)
            with torch.no_grad():
                p.copy_(local)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        norms = []
        for step in steps:
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                tokens = torch.randint(0, 13, (6,), generator=generator)
                model.set_requires_gradient_sync(micro == 1)
                model.set_is_last_backward(micro == 1)
                model.set_reshard_after_backward(micro == 1)
                (model(tokens).pow(2).mean() / 2).backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(float(norm.full_tensor()))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    model, optimizer = build()
    assert isinstance(model, fsdp.FSDPModule)
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    handle.wait()
    model.blocks[0].reshard()
    norms = train(model, optimizer, range(3))
    with torch.no_grad():
        features = model.features(torch.arange(5))
    fsdp.share_comm_ctx([model])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.state_dict_saver.save({"m": model_state, "o": optimizer_state}, checkpoint_id=folder)
    dist.barrier()
    other, its = build()
    other_state, its_state = get_state_dict(other, its)
    dcp.state_dict_loader.load({"m": other_state, "o": its_state}, checkpoint_id=folder)
    set_state_dict(other, its, model_state_dict=other_state, optim_state_dict=its_state)
    resumed = train(other, its, range(3, 5))
    straight = train(model, optimizer, range(3, 5))
    end: Gradients = {name: full(p) for name, p in other.named_parameters()}
    return {
        "norms": norms + straight,
        "resumed": resumed == straight,
        "features": full(features),
        "end": end,
        "keys": list(model.state_dict()),
    }


def package() -> ModuleType:
    """Return the package by whatever name it is imported: copies live under other roots."""
    return sys.modules[fully_shard.__module__.rpartition(".")[0]]


def run_script(rank: int, names: str, folder: str) -> dict[str, Any]:
    """Run the script with the names of "ours", of "theirs", or with ours in place of theirs."""
    theirs = torch.distributed.fsdp
    if names == "ours":
        return script(package(), rank, folder)
    if names == "theirs":
        return script(theirs, rank, folder)
    ours = {name: getattr(package(), name) for name in NAMES}
    with mock.patch.multiple(theirs, **ours), mock.patch.multiple(_fully_shard, **ours):
        return script(theirs, rank, folder)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("names", ["ours", "replaced"])
def test_a_script_for_torch_gives_the_same_bits(ranks: Ranks, names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = ranks(2).run(run_script, names, str(Path(folder) / "ours"))
        theirs = ranks(2).run(run_script, "theirs", str(Path(folder) / "theirs"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["resumed"]
        assert other["resumed"]
        assert mine["norms"] == other["norms"]
        assert mine["keys"] == other["keys"]
        assert torch.equal(mine["features"], other["features"])
        assert all(torch.equal(mine["end"][name], other["end"][name]) for name in other["end"])
