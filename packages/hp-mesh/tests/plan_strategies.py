"""Models, clusters and runs to plan for."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from hp_mesh.planner import Cluster, ModelShape, TrainSpec

# What every configuration of a decoder says.
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}


@st.composite
def shapes(draw: st.DrawFn, *, experts: bool | None = None) -> ModelShape:
    """Give a small decoder, dense or with experts."""
    heads = draw(st.sampled_from([4, 8, 12, 16]))
    fields: dict[str, Any] = {
        "layers": draw(st.integers(2, 12)),
        "hidden": heads * 64,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([heads // 4, heads // 2, heads])),
        "ffn": draw(st.sampled_from([512, 768, 1024])),
        "vocab": draw(st.sampled_from([256, 1000, 32000])),
        "glu": draw(st.booleans()),
        "tied": draw(st.booleans()),
    }
    if draw(st.booleans()) if experts is None else experts:
        fields |= {
            "experts": draw(st.sampled_from([4, 6, 8])),
            "top_k": draw(st.integers(1, 4)),
            "expert_ffn": draw(st.sampled_from([128, 192, 256])),
            "shared_ffn": draw(st.sampled_from([0, 256])),
            "dense_layers": draw(st.integers(0, fields["layers"] - 1)),
        }
    return ModelShape(**fields)


@st.composite
def clusters(draw: st.DrawFn, *, worlds: st.SearchStrategy[int] | None = None) -> Cluster:
    """Give a cluster of up to 24 devices, some nodes of which have fewer than eight."""
    world = draw(worlds or st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]))
    return Cluster(
        world_size=world,
        accelerator=draw(st.sampled_from(["A100-80", "H100", "B200"])),
        ranks_per_node=draw(st.sampled_from([1, 4, 8]).filter(lambda n: n in nodes(world))),
    )


def nodes(world: int) -> list[int]:
    """Give the sizes of nodes up to 12 that a cluster may have; 8 need not divide its devices."""
    return [n for n in range(1, 13) if world % n == 0 or n > world or n == 8]


def with_bandwidths(cluster: Cluster) -> Cluster:
    """Give the same cluster, with numbers in place of the usual bandwidths."""
    intra, inter = cluster.fast.bandwidth / 1e9, cluster.slow.bandwidth / 1e9
    return replace(cluster, intra_gbs=intra, inter_gbs=inter)


@st.composite
def runs(draw: st.DrawFn) -> TrainSpec:
    """Give a run with or without choices for the planner."""
    stages = draw(st.sampled_from([1, 1, 2]))
    return TrainSpec(
        seq_len=draw(st.sampled_from([64, 96, 512])),
        global_batch=draw(st.sampled_from([4, 8, 12, 24])),
        micro_batch=draw(st.none() | st.sampled_from([1, 2, 3])),
        recompute=draw(st.none() | st.sampled_from(["none", "selective", "selective-op", "full"])),
        schedule="1f1b" if stages == 1 else "interleaved",
        virtual_stages=stages,
        fused=draw(st.booleans()),
        # From a world that always fits to one that never does.
        memory_fraction=draw(st.sampled_from([1.0, 1e-3, 1e-4, 1e-6])),
    )
