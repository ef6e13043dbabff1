"""What a model, its sequences and its batch ask of the degrees."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import MODELS, ModelShape

from .strategies import dims, divisors

MODEL = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "intermediate_size": 96,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("degrees", "change", "message"),
    [
        (
            {"tp": 3},
            {},
            "tp=3 does not divide num_attention_heads=16; use 1, 2, 4, 8 or 16\n"
            "tp=3 does not divide num_key_value_heads=4; use 1, 2 or 4\n"
            "tp=3 does not divide vocab_size=320; "
            "use 1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, 80, 160 or 320",
        ),
        ({"tp": 8}, {}, "tp=8 does not divide num_key_value_heads=4; use 1, 2 or 4"),
        (
            {"tp": 2, "cp": 16, "ulysses_degree": 16},
            {},
            "tp*ulysses_degree=2*16=32 does not divide num_attention_heads=16; "
            "use tp=1, or ulysses_degree=1, 2, 4 or 8",
        ),
        (
            {"tp": 4, "cp": 3, "ulysses_degree": 3},
            {"num_attention_heads": 10, "num_key_value_heads": 12},
            "tp=4 does not divide num_attention_heads=10; use 1, 2, 5 or 10\n"
            "tp*ulysses_degree=4*3=12 does not divide num_attention_heads=10; "
            "use tp*ulysses_degree=1, 2, 5 or 10",
        ),
        ({"dp_shard": 3, "ep": 3}, {}, "ep=3 does not divide num_experts=8; use 1, 2, 4 or 8"),
        (
            {"tp": 4},
            {"intermediate_size": 6},
            "tp=4 does not divide intermediate_size=6; use 1, 2, 3 or 6",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_what_would(
    degrees: dict[str, int], change: dict[str, int], message: str
) -> None:
    dims = ParallelDims(**{"dp_shard": 1, **degrees})  # type: ignore[arg-type]
    with pytest.raises(ParallelDimsError) as caught:
        dims.validate({**MODEL, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("degrees", "arguments", "message"),
    [
        (
            {"cp": 2, "tp": 2},
            {"seq_len": 6},
            "cp*tp=2*2=4 does not divide seq_len=6; use cp=1 or 3, or tp=1 or 3",
        ),
        (
            {"dp_replicate": 2, "dp_shard": 3},
            {"global_batch": 8},
            "dp_replicate*dp_shard=2*3=6 does not divide global_batch=8; use dp_shard=1, 2 or 4",
        ),
        (
            {"cp": 2, "tp": 2},
            {"seq_len": 4095, "causal_balance": True},
            "2*cp*tp=2*2*2=8 does not divide seq_len=4095; use seq_len=4088 or 4096",
        ),
        (
            {"cp": 4},
            {"seq_len": 7, "causal_balance": True},
            "2*cp=2*4=8 does not divide seq_len=7; use seq_len=8",
        ),
        (
            {"dp_replicate": 3, "dp_shard": 5},
            {"global_batch": 16},
            "dp_replicate*dp_shard=3*5=15 does not divide global_batch=16; "
            "use dp_replicate*dp_shard=1, 2, 4, 8 or 16, or global_batch=15 or 30",
        ),
    ],
)
def test_sequences_and_batches_must_divide_over_the_ranks(
    degrees: dict[str, int], arguments: dict[str, Any], message: str
) -> None:
    dims = ParallelDims(**{"dp_shard": 1, **degrees})  # type: ignore[arg-type]
    with pytest.raises(ParallelDimsError) as caught:
        dims.validate({}, **arguments)
    assert str(caught.value) == message


def test_balance_is_only_asked_of_sequences_that_are_cut() -> None:
    assert not ParallelDims(tp=2, dp_shard=1).check({}, seq_len=6, causal_balance=True)
    assert not ParallelDims(cp=2, dp_shard=1).check({}, seq_len=6)


@pytest.mark.parametrize(
    ("degrees", "model", "seq_len", "advice"),
    [
        (
            {"cp": 12, "ulysses_degree": 6},
            {"n_heads": 24, "n_kv_heads": 4},
            24,
            "ulysses_degree=6 neither divides n_kv_heads=4 nor is a multiple of it; "
            "use 1, 2, 4 or 12",
        ),
        (
            {"tp": 2, "cp": 6, "ulysses_degree": 2},
            {"n_heads": 12, "n_kv_heads": 6},
            24,
            "ulysses_degree=2 neither divides n_kv_heads/tp=6/2=3 nor is a multiple of it; "
            "use 1, 3 or 6",
        ),
        (
            {"cp": 4, "ulysses_degree": 4},
            {"n_heads": 6, "n_kv_heads": 2},
            24,
            "ulysses_degree=4 does not divide n_heads=6; use 1 or 2",
        ),
        ({"cp": 4}, {}, 12, "2*cp=2*4=8 does not divide seq_len=12; use cp=1, 2, 3 or 6"),
        ({"cp": 4}, {}, 11, "2*cp=2*4=8 does not divide seq_len=11; use seq_len=8 or 16"),
        (
            {"pp": 4},
            {"num_hidden_layers": 126},
            None,
            "pp=4 does not divide num_hidden_layers=126: stages of 31 and 32 layers; "
            "use 1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63 or 126",
        ),
    ],
)
def test_what_works_with_unequal_shares_is_advice_and_no_error(
    degrees: dict[str, int], model: dict[str, int], seq_len: int | None, advice: str
) -> None:
    dims = ParallelDims(**{"dp_shard": 1, **degrees})  # type: ignore[arg-type]
    report = dims.check(model, seq_len, causal_balance=True)
    assert [(str(v), v.level) for v in report] == [(advice, "advice")]
    assert report.errors == ()
    dims.validate(model, seq_len, causal_balance=True)


@pytest.mark.parametrize(
    ("degrees", "model", "message"),
    [
        ({"pp": 4}, {"n_layers": 3}, "pp=4 is more stages than n_layers=3; use 1 or 3"),
    ],
)
def test_stages_without_layers_are_refused(
    degrees: dict[str, int], model: dict[str, object], message: str
) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(dp_shard=1, **degrees).validate(model)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_ends_that_are_not_shared_and_one_stage_break_no_rule() -> None:
    assert not ParallelDims(pp=2, dp_shard=1).check({"n_layers": 4, "tie_word_embeddings": False})
    assert not ParallelDims(dp_shard=2).check({"tie_word_embeddings": True})
    assert ParallelDims(pp=2, dp_shard=1).check({"n_layers": 4}).skipped == ("tied",)
    (violation,) = ParallelDims(pp=2, dp_shard=1).check({"n_layers": 4, "weight_tying": 1})
    assert str(violation) == "weight_tying=1 is not True or False"


@given(dims(), st.fixed_dictionaries({n: st.integers(1, 64) for n in MODEL}), st.integers(1, 512))
@settings(deadline=None, max_examples=200)
def test_a_configuration_is_refused_exactly_when_something_does_not_divide(
    dims: ParallelDims, model: dict[str, int], number: int
) -> None:
    heads, kv_heads, experts, ffn, vocab = (model[name] for name in MODEL)
    ulysses = dims.ulysses_degree or 1
    kv = kv_heads // dims.tp
    remainders = {
        "heads-tp": heads % dims.tp,
        "kv-heads-tp": kv_heads % dims.tp,
        "heads-ulysses": heads % (dims.tp * ulysses) if ulysses > 1 else 0,
        # A tp rank's kv heads cannot be dealt out before tp divides them.
        "kv-heads-ulysses": kv_heads % dims.tp == 0 and bool(kv % ulysses and ulysses % kv),
        "experts-ep": experts % dims.ep,
        "ffn-tp": ffn % dims.tp,
        "vocab-tp": vocab % dims.tp,
        "sequence": number % (dims.cp * dims.tp),
        "batch": number % dims.dp_size,
    }
    report = dims.check(model, seq_len=number, global_batch=number)
    assert {v.rule for v in report} == {rule for rule, rest in remainders.items() if rest}
    uneven = {
        "heads-ulysses": heads >= dims.tp * ulysses,
        "kv-heads-ulysses": True,
        "sequence": dims.tp == 1 and number >= dims.cp,
    }
    assert {v.rule for v in report if v.level == "advice"} == {
        rule for rule, works in uneven.items() if works and remainders[rule]
    }


@given(dims(), st.fixed_dictionaries({n: st.integers(1, 64) for n in MODEL}), st.integers(1, 96))
@settings(deadline=None, max_examples=200)
def test_every_error_offers_alternatives_and_all_of_them_divide(
    dims: ParallelDims, model: dict[str, int], number: int
) -> None:
    for violation in dims.check(model, seq_len=number, global_batch=number):
        assert any(violation.legal.values())
        if violation.rule == "kv-heads-ulysses":
            continue
        *axes, field = violation.values
        for name, choices in violation.legal.items():
            for choice in choices:
                values = {axis: int(str(violation.values[axis])) for axis in violation.values}
                first, *others = name.split("*")
                values |= {first: choice, **dict.fromkeys(others, 1)}
                assert values[field] % prod(values[axis] for axis in axes) == 0


@given(st.integers(1, 24), st.integers(1, 3), st.integers(1, 12), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_every_ulysses_degree_that_is_offered_for_the_heads_divides_cp(
    heads: int, tp: int, ulysses: int, outer: int
) -> None:
    model = {"num_attention_heads": heads, "num_key_value_heads": heads}
    dims = ParallelDims(tp=tp, cp=ulysses * outer, ulysses_degree=ulysses, dp_shard=1)
    for violation in dims.check(model):
        for degree in violation.legal.get("ulysses_degree", ()):
            changed = replace(dims, ulysses_degree=degree)
            assert violation.rule not in {v.rule for v in changed.check(model)}


@given(st.integers(1, 24), st.integers(1, 3), st.integers(1, 12), st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_every_ulysses_degree_that_the_kv_heads_allow_is_offered_and_no_other(
    kv: int, tp: int, ulysses: int, outer: int
) -> None:
    def found(degree: int) -> list[Any]:
        dims = ParallelDims(tp=tp, cp=ulysses * outer, ulysses_degree=degree, dp_shard=1)
        return list(dims.check({"num_key_value_heads": kv * tp}))

    for violation in found(ulysses):
        assert violation.rule == "kv-heads-ulysses"
        degrees = [degree for degree in divisors(ulysses * outer) if not found(degree)]
        assert list(violation.legal["ulysses_degree"]) == degrees


@pytest.mark.parametrize("dense", [[], [1]])
def test_a_feed_forward_width_that_no_layer_has_is_divided_by_nothing(dense: list[int]) -> None:
    model = {"num_experts": 8, "intermediate_size": 100, "moe_intermediate_size": 96}
    model |= {"num_hidden_layers": 4}
    twelve = ParallelDims(tp=12, world_size=12)
    # Whether there are layers without experts is not known.
    assert [v.rule for v in twelve.check(model).errors] == ["ffn-tp"]
    found = twelve.check({**model, "decoder_sparse_step": 1, "mlp_only_layers": dense})
    assert [v.rule for v in found.errors] == ["ffn-tp"] * bool(dense)
    shape = ModelShape(
        layers=4,
        hidden=96,
        heads=12,
        ffn=100,
        vocab=960,
        experts=8,
        top_k=2,
        expert_ffn=96,
        dense_layers=len(dense),
    )
    assert [v.rule for v in twelve.check(shape.to_config()).errors] == ["ffn-tp"] * bool(dense)


def test_a_dense_member_of_a_family_with_experts_is_no_error_unless_ep_is_asked_for() -> None:
    dense = {**MODEL, "num_experts": 0}
    assert not ParallelDims(dp_shard=4).check(dense, seq_len=8)
    (violation,) = ParallelDims(dp_shard=4, ep=4).check(dense, seq_len=8)
    assert str(violation) == "ep=4 has no experts to divide: num_experts=0; use 1"


def test_tied_embeddings_on_two_stages_are_advice_that_says_what_they_cost() -> None:
    dims = ParallelDims(pp=2, dp_shard=1)
    model = {"n_layers": 4, "tie_word_embeddings": True}
    (found,) = dims.check(model)
    assert (found.rule, found.level, found.legal) == ("tied-pp", "advice", {"pp": (1,)})
    assert str(found) == (
        "pp=2 with tie_word_embeddings=True keeps the embedding on the first and the last stage: "
        "both hold it with its gradient and optimizer state, and its gradients must be summed over "
        "the two in each step; use 1"
    )
    dims.validate(model)


@pytest.mark.parametrize("seq_len", [61, 1, 64])
def test_without_sequence_parallelism_tp_asks_nothing_of_a_sequence(seq_len: int) -> None:
    dims = ParallelDims(tp=4, dp_shard=1)
    dims.validate({}, seq_len=seq_len, sequence_parallel=False)
    assert not dims.check({}, seq_len, sequence_parallel=False)
    rules = {e.rule: e for e in dims.explain({}, seq_len, sequence_parallel=False)}
    assert rules["sequence"].verdict == "idle"


@given(dims(), st.integers(1, 512), st.booleans())
@settings(deadline=None, max_examples=100)
def test_without_sequence_parallelism_a_sequence_is_checked_as_if_tp_were_one(
    dims: ParallelDims, number: int, balance: bool
) -> None:
    alone = ParallelDims(dp_shard=dims.dp_shard, cp=dims.cp, dp_replicate=dims.dp_replicate)
    report = dims.check({}, number, causal_balance=balance, sequence_parallel=False)
    assert list(report) == list(alone.check({}, number, causal_balance=balance))
    explained = dims.explain({}, number, causal_balance=balance, sequence_parallel=False)
    (sequence,) = (e for e in explained if e.rule == "sequence")
    assert (sequence.verdict in ("error", "advice")) == bool(report)


def test_a_sequence_is_taken_as_cut_over_tp_unless_told_otherwise() -> None:
    dims = ParallelDims(tp=4, cp=2, dp_shard=1)
    with pytest.raises(ParallelDimsError, match=r"^cp\*tp=2\*4=8 does not divide seq_len=61; use "):
        dims.validate({}, seq_len=61)
    (advice,) = dims.check({}, 61, sequence_parallel=False)
    assert str(advice) == "cp=2 does not divide seq_len=61; use 1 or 61"
    assert advice.level == "advice"


@pytest.mark.parametrize("name", ["moe_intermediate_size", "expert_ffn"])
def test_etp_divides_the_width_of_an_expert(name: str) -> None:
    dims = ParallelDims(tp=2, etp=2, ep=2, world_size=8)
    model = {"num_experts": 4, "intermediate_size": 64}
    (violation,) = dims.check({**model, name: 9}).errors
    assert str(violation) == f"etp=2 does not divide {name}=9; use 1"
    assert not dims.check({**model, name: 8})
    assert not ParallelDims(tp=2, ep=2, world_size=8).check({**model, name: 9})
    (line,) = [e for e in dims.explain({**model, name: 9}) if e.rule == "expert-ffn-etp"]
    assert (line.verdict, line.values) == ("error", {"etp": 2, "num_experts": 4, name: 9})


def test_the_width_of_an_expert_is_named_where_it_is_absent() -> None:
    dims = ParallelDims(tp=2, etp=2, ep=2, world_size=8)
    assert "expert_ffn" in dims.check({"num_experts": 4}).skipped
    dense = ParallelDims(tp=2, etp=2, world_size=8)
    assert "expert_ffn" not in dense.check({"num_experts": 0}).skipped
    assert "expert_ffn" not in ParallelDims(tp=2, world_size=8).check({}).skipped


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_s_shapes_have_every_field_that_rules_read(name: str) -> None:
    dims = ParallelDims(dp_shard=2, cp=2, tp=2, pp=2, ep=2, etp=2, ulysses_degree=2)
    assert dims.check(MODELS[name].to_config(), 64, 8).skipped == ()
    assert not [
        e.rule
        for e in dims.explain(MODELS[name].to_config(), 64, 8)
        if e.verdict == "idle" and MODELS[name].experts
    ]


@pytest.mark.parametrize("name", ["causal_balance", "sequence_parallel"])
def test_an_option_of_a_check_is_a_bool(name: str) -> None:
    with pytest.raises(ParallelDimsError, match=f"^{name}='no' is neither true nor false"):
        ParallelDims(tp=2, world_size=4).check({}, seq_len=6, **{name: "no"})  # type: ignore[arg-type]
