"""Explanations: every rule, kept or not, with its numbers."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, Topology

from .strategies import dims

MODEL = ("n_heads", "n_kv_heads", "n_routed_experts", "ffn_dim", "vocab_size", "n_layers")


@given(
    dims(),
    st.fixed_dictionaries({n: st.none() | st.integers(1, 64) | st.just("x") for n in MODEL}),
    st.none() | st.integers(1, 96),
    st.integers(1, 16),
)
@settings(deadline=None, max_examples=200)
def test_explanations_find_what_the_check_finds_and_nothing_else(
    dims: ParallelDims, model: dict[str, Any], number: int | None, node: int
) -> None:
    topology = Topology(ranks_per_node=node)
    report = dims.check(model, number, number, topology=topology)
    explained = dims.explain(model, number, number, topology=topology)
    levels = Counter(e.verdict for e in explained if e.verdict in ("error", "advice"))
    # One wrong number may be what several rules ask for, or none of them.
    found = Counter(v.level for v in report if v.rule != "number")
    assert levels["advice"] == found["advice"]
    assert levels["error"] >= found["error"]
    codes = {e.rule for e in explained if e.verdict in ("error", "advice")}
    # The one rule whose code goes on, and numbers that only some rules ask for.
    broken = {v.rule.replace("-balance", "") for v in report if v.rule != "number"}
    assert broken <= codes
    texts = " ".join(e.text for e in explained)
    assert all(str(v) in texts for v in report if v.rule != "number")
    missing = {e.text.rpartition(", but ")[2] for e in explained if e.verdict == "skipped"}
    assert missing == {f"{name} is not known" for name in report.skipped}


def test_a_rule_shows_its_numbers_and_whether_it_had_anything_to_ask() -> None:
    dims = ParallelDims(tp=16, dp_shard=4)
    rules = {e.rule: e for e in dims.explain({"num_attention_heads": 128})}
    assert rules["product"].text == "dp_shard*tp=4*16 is world_size=64"
    heads = rules["heads-tp"]
    assert (heads.verdict, heads.text) == ("holds", "tp=16, num_attention_heads=128")
    assert heads.sentence == "Attention heads divide over tp."
    assert heads.values == {"tp": 16, "num_attention_heads": 128}
    kv = rules["kv-heads-tp"]
    assert (kv.verdict, kv.text) == ("skipped", "tp=16, but kv_heads is not known")
    experts = rules["experts-ep"]
    assert (experts.verdict, experts.text) == ("idle", "ep=1")


def test_a_topology_adds_a_line_for_each_axis() -> None:
    lines = ParallelDims(tp=16, dp_shard=4).explain(topology=Topology(ranks_per_node=8))
    texts = {e.rule: (e.verdict, e.text) for e in lines}
    assert texts["node-tp"] == ("advice", "tp=16 crosses nodes of 8 ranks")
    assert texts["node-cp"] == ("idle", "cp=1 stays inside nodes of 8 ranks")
    assert texts["topology"] == ("holds", "world_size=64 fills nodes of 8 ranks")
