"""What is read from models and configurations, whatever they call it and wherever they have it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import MODELS, ModelShape

MODEL = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "intermediate_size": 96,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("config", "degrees", "rules"),
    [
        (
            transformers.LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3),
            {"tp": 4},
            {"heads-tp", "kv-heads-tp"},
        ),
        (transformers.MixtralConfig(num_local_experts=6), {"ep": 4, "dp_shard": 4}, {"experts-ep"}),
        (
            transformers.DeepseekV3Config(n_routed_experts=6),
            {"ep": 4, "dp_shard": 4},
            {"experts-ep"},
        ),
        (transformers.Qwen3MoeConfig(num_experts=6), {"ep": 4, "dp_shard": 4}, {"experts-ep"}),
        (
            transformers.DbrxConfig(
                n_heads=24,
                vocab_size=9,
                attn_config={"kv_n_heads": 8},
                ffn_config={"moe_num_experts": 8, "ffn_hidden_size": 10},
            ),
            {"ep": 3, "tp": 3},
            {"experts-ep", "kv-heads-tp", "ffn-tp"},
        ),
        (
            transformers.FalconConfig(hidden_size=4096, num_attention_heads=64),
            {"tp": 2},
            {"kv-heads-tp"},
        ),
        (
            transformers.FalconConfig(hidden_size=4096, num_attention_heads=64, multi_query=False),
            {"tp": 2},
            set(),
        ),
        (
            transformers.FalconConfig(
                hidden_size=4096,
                num_attention_heads=64,
                num_kv_heads=8,
                new_decoder_architecture=True,
            ),
            {"tp": 16},
            {"kv-heads-tp"},
        ),
        (
            transformers.FalconConfig(
                hidden_size=4096,
                num_attention_heads=64,
                num_kv_heads=8,
                new_decoder_architecture=True,
            ),
            {"tp": 8},
            set(),
        ),
        (
            transformers.GPTBigCodeConfig(n_head=16, vocab_size=64, n_inner=64),
            {"tp": 2},
            {"kv-heads-tp"},
        ),
        (transformers.Gemma3nConfig(), {"tp": 2}, set()),
        (
            transformers.Gemma3nConfig(text_config={"intermediate_size": 9}),
            {"tp": 2},
            {"ffn-tp"},
        ),
        (transformers.GPT2Config(n_layer=3), {"pp": 4}, {"layers-pp"}),
        (
            transformers.Gemma3Config(text_config={"num_hidden_layers": 3}),
            {"pp": 4},
            {"layers-pp"},
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "model_type") else "",
)
def test_configurations_of_transformers_are_read_as_they_are(
    config: object, degrees: dict[str, int], rules: set[str]
) -> None:
    dims = ParallelDims(**{"dp_shard": 1, **degrees})  # type: ignore[arg-type]
    assert {violation.rule for violation in dims.check(config).errors} == rules


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(tie_word_embeddings=True),
        transformers.GPT2Config(),
        transformers.Gemma3Config(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tied_embeddings_of_transformers_are_advice(config: object) -> None:
    report = ParallelDims(pp=2, dp_shard=1).check(config)
    assert [found.rule for found in report] == ["tied-pp"]
    assert report.errors == ()


@given(st.lists(st.integers(1, 48), min_size=1, max_size=4), st.integers(2, 4))
@settings(deadline=None, max_examples=100)
def test_widths_of_single_layers_are_refused_exactly_when_one_of_them_does_not_divide(
    widths: list[int], tp: int
) -> None:
    def found(width: object) -> list[Any]:
        return list(ParallelDims(tp=tp, dp_shard=1).check({"intermediate_size": width}))

    assert bool(found(widths)) == any(found(width) for width in widths)
    for violation in found(tuple(widths)):
        assert violation.rule == "ffn-tp"
        for legal in violation.legal["tp"]:
            assert not any(width % legal for width in widths)


def test_widths_that_differ_are_named_as_what_divides_them_all() -> None:
    dims = ParallelDims(tp=4, dp_shard=1)
    (same,) = dims.check({"intermediate_size": [6, 6]}, seq_len=4)
    assert str(same) == "tp=4 does not divide intermediate_size=6; use 1, 2, 3 or 6"
    (other,) = dims.check({"intermediate_size": [8, 12, 6]}, seq_len=4)
    assert str(other) == "tp=4 does not divide gcd(intermediate_size)=2; use 1 or 2"


@pytest.mark.parametrize("widths", [[], [8, "x"], [8, 0], [8, [8]], [8, 2.0]])
def test_widths_of_single_layers_that_are_no_numbers_are_one_error(widths: list[object]) -> None:
    (violation,) = ParallelDims(tp=2, dp_shard=1).check({"intermediate_size": widths}, seq_len=8)
    assert str(violation) == f"intermediate_size={widths!r} is not a positive integer"


@pytest.mark.parametrize("model", [None, "llama", b"llama", 5, 2.5, True, [], [MODEL], (), {"tp"}])
def test_what_can_have_no_fields_is_no_model(model: object) -> None:
    dims = ParallelDims(tp=3, dp_shard=1)
    for ask in (dims.check, dims.validate, dims.explain):
        if ask == dims.explain and model is None:
            continue
        with pytest.raises(ParallelDimsError, match=r"^model=.* use a mapping or an object with"):
            ask(model)
    assert dims.explain(None) == dims.explain({})


@pytest.mark.parametrize("digits", [10, 4000, 5000])
def test_sizes_beyond_any_model_are_refused_in_a_short_sentence(digits: int) -> None:
    (violation,) = ParallelDims(tp=3, dp_shard=1).check({"n_heads": 10**digits}, seq_len=3)
    assert violation.rule == "number"
    assert str(violation).endswith(" is not at most 4294967296")
    assert len(str(violation)) < 200


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_read_under_every_name_in_use(spelling: str) -> None:
    (violation,) = ParallelDims(dp_shard=3, ep=3).check({spelling: 8}, global_batch=3)
    assert violation.values == {"ep": 3, spelling: 8}


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(**MODEL),
        SimpleNamespace(config=SimpleNamespace(**MODEL)),
        SimpleNamespace(text_config=SimpleNamespace(**MODEL)),
        {"text_config": MODEL, "num_key_value_heads": None},
        SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(**MODEL))),
    ],
)
def test_models_and_configurations_are_read_wherever_the_fields_are(model: object) -> None:
    report = ParallelDims(tp=8, dp_shard=1).check(model, seq_len=8)
    assert [v.rule for v in report] == ["kv-heads-tp"]
    assert report.skipped == ()


@pytest.mark.parametrize("value", ["x", "16", -16, 2.0, True, False, [16]])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_local_experts", "ffn_dim"])
def test_a_field_that_is_no_positive_integer_is_one_error_and_not_absent(
    name: str, value: object
) -> None:
    dims = ParallelDims(tp=2, cp=2, ep=2, ulysses_degree=2, dp_shard=1)
    model = {**MODEL, "num_local_experts": 8, "ffn_dim": 96}
    if name == "num_local_experts":
        del model["num_experts"]
    if name == "ffn_dim":
        del model["intermediate_size"]
    report = dims.check({**model, name: value}, seq_len=8)
    (violation,) = report
    assert (violation.rule, violation.values) == ("number", {name: value})
    assert str(violation) == f"{name}={value!r} is not a positive integer"
    assert report.skipped == ()
    with pytest.raises(ParallelDimsError, match=f"^{name}="):
        ParallelDims(dp_shard=1).validate({name: value})  # also where no rule needs it


@pytest.mark.parametrize("value", ["4096", -1, 0, 4096.0, True])
@pytest.mark.parametrize("name", ["seq_len", "global_batch"])
def test_a_length_or_batch_that_is_no_positive_integer_is_an_error(
    name: str, value: object
) -> None:
    arguments: dict[str, Any] = {"seq_len": 8, "global_batch": 8, name: value}
    report = ParallelDims(tp=2, dp_shard=2).check({"n_heads": 4}, **arguments)
    assert [str(violation) for violation in report] == [
        f"{name}={value!r} is not a positive integer"
    ]
    assert report.skipped == ("kv_heads", "ffn", "vocab")


def test_integers_of_other_types_are_checked_like_any() -> None:
    report = ParallelDims(tp=3, dp_shard=1).check({"n_heads": np.int64(4)}, seq_len=np.int64(6))  # type: ignore[arg-type]
    assert [violation.rule for violation in report] == ["heads-tp"]


def test_names_that_a_model_uses_for_other_things_and_unknown_names_are_no_fields() -> None:
    model = SimpleNamespace(ffn=object(), vocab=["a", "b"], learning_rate="x")
    report = ParallelDims(tp=2, dp_shard=1).check(model, seq_len=8)
    assert not report
    assert report.skipped == ("heads", "kv_heads", "ffn", "vocab")


def test_absent_fields_are_named_only_where_a_rule_needs_them() -> None:
    assert ParallelDims(dp_shard=1).check({}).skipped == ()
    report = ParallelDims(tp=2, ep=2, dp_shard=2).check({"n_heads": 4})
    assert not report
    assert report.skipped == ("kv_heads", "experts", "ffn", "vocab", "seq_len", "global_batch")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_shapes_of_the_planner_are_checked_as_their_configurations_are(name: str) -> None:
    shape = MODELS[name]
    for dims in (
        ParallelDims(tp=64, dp_shard=1),
        ParallelDims(ep=16, pp=7, dp_shard=16),
        ParallelDims(tp=2, pp=2, dp_shard=2),
    ):
        found, expected = (dims.check(each, 8192, 64) for each in (shape, shape.to_config()))
        assert [v.rule for v in found] == [v.rule for v in expected]
        assert found.skipped == expected.skipped == ()


def test_a_shape_that_breaks_rules_is_refused() -> None:
    with pytest.raises(ParallelDimsError, match="tp=64 does not divide heads=32"):
        ParallelDims(tp=64, world_size=64).validate(MODELS["llama3-8b"], seq_len=8192)
    with pytest.raises(ParallelDimsError, match="ep=16 does not divide experts=8"):
        ParallelDims(ep=16, dp_shard=16).validate(MODELS["mixtral-8x7b"])


def test_modules_under_the_names_of_a_shape_are_no_fields() -> None:
    names = ("heads", "kv_heads", "experts", "layers", "tied", "ffn", "vocab")
    module = SimpleNamespace(config=MODEL, **{key: [object()] for key in names})
    dims = ParallelDims(tp=16, ep=16, pp=2, dp_shard=16)
    found, expected = dims.check(module, 64), dims.check(MODEL, 64)
    assert [*found] == [*expected] != []
    assert found.skipped == expected.skipped


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"num_attention_heads": 32, "n_heads": 16}, "num_attention_heads=32 and n_heads=16"),
        ({"vocab": np.int64(9), "vocab_size": 8}, "vocab_size=8 and vocab=9"),
        (SimpleNamespace(config={"ffn": 96, "ffn_dim": 64}), "ffn_dim=64 and ffn=96"),
    ],
)
def test_two_names_of_one_field_with_different_values_are_refused(model: Any, text: str) -> None:
    with pytest.raises(ParallelDimsError, match=f"^{text} differ, but all of them are names of"):
        ParallelDims(tp=2, dp_shard=1).check(model)
    with pytest.raises(ParallelDimsError, match=f"^{text} differ"):
        ModelShape.from_config(model)


def test_two_names_of_one_field_with_one_value_are_read() -> None:
    model = {"num_attention_heads": 6, "n_heads": np.int64(6)}
    (violation,) = ParallelDims(tp=4, dp_shard=1).check(model)
    assert violation.values == {"tp": 4, "num_attention_heads": 6}
    # A nested configuration has priority over its parent.
    nested = {"n_heads": 3, "text_config": {"num_attention_heads": 6}}
    assert [*ParallelDims(tp=4, dp_shard=1).check(nested)] == [violation]
