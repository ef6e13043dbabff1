"""Shapes of models, read from the configurations that describe them."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import MODELS, ModelShape

from .plan_strategies import SMALL

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.MixtralConfig(), "mixtral-8x7b"),
        (transformers.DeepseekV3Config(), "deepseek-v3"),
    ],
)
def test_a_configuration_object_gives_the_shape_of_the_catalogue(config: object, name: str) -> None:
    found, known = ModelShape.from_config(config), MODELS[name]
    assert found.parameters == known.parameters
    assert found.active_parameters == known.active_parameters
    assert (found.layers, found.dense_layers) == (known.layers, known.dense_layers)


@pytest.mark.parametrize("wrap", [dict, lambda config: SimpleNamespace(config=config)])
def test_a_parsed_file_works_as_it_is_and_so_does_what_holds_one(wrap: Any) -> None:
    config = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "model_type": "qwen3_moe",
    }
    found = ModelShape.from_config(wrap(config))
    assert found.name == "qwen3_moe"
    assert found.parameters == MODELS["qwen3-30b-a3b"].parameters


def test_the_language_model_of_a_larger_one_is_found() -> None:
    text = {
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "vocab_size": 202048,
    }
    found = ModelShape.from_config({"model_type": "llama4", "text_config": text})
    assert found.parameters == MODELS["llama4-maverick"].parameters


def test_a_model_of_two_matrices_with_its_usual_width_is_read() -> None:
    found = ModelShape.from_config(GPT2)
    assert not found.glu
    assert found.tied
    assert found.ffn == 3072
    # The published 124 million, less positions and biases.
    assert found.parameters / 1e6 == pytest.approx(124 - 0.8 - 0.1, rel=0.005)


# In billions, from the models' own papers and pages.
@pytest.mark.parametrize(
    ("config", "total"),
    [
        (
            {
                "model_type": "bloom",
                "n_layer": 70,
                "hidden_size": 14336,
                "n_head": 112,
                "vocab_size": 250880,
            },
            176.2,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "num_kv_heads": 71,
                "multi_query": True,
                "vocab_size": 65024,
            },
            6.92,
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 32,
                "d_model": 4096,
                "n_heads": 32,
                "expansion_ratio": 4,
                "vocab_size": 50432,
            },
            6.65,
        ),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 40,
                "n_embd": 6144,
                "n_head": 48,
                "n_inner": 24576,
                "multi_query": True,
                "vocab_size": 49152,
            },
            15.5,
        ),
        (
            {
                "model_type": "starcoder2",
                "num_hidden_layers": 40,
                "hidden_size": 6144,
                "num_attention_heads": 48,
                "num_key_value_heads": 4,
                "intermediate_size": 24576,
                "vocab_size": 49152,
                "tie_word_embeddings": False,
            },
            16.0,
        ),
        (
            {
                "model_type": "nemotron",
                "num_hidden_layers": 32,
                "hidden_size": 6144,
                "num_attention_heads": 48,
                "num_key_value_heads": 8,
                "intermediate_size": 24576,
                "vocab_size": 256000,
            },
            15.6,
        ),
        (
            {
                "model_type": "bert",
                "num_hidden_layers": 24,
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
                "vocab_size": 30522,
            },
            0.335,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_a_family_of_two_matrices_has_its_published_number_of_parameters(
    config: dict[str, Any], total: float
) -> None:
    found = ModelShape.from_config(config)
    assert not found.glu
    assert found.parameters / 1e9 == pytest.approx(total, rel=0.02)


def test_a_file_of_a_family_that_ties_by_default_need_not_say_so() -> None:
    gemma: dict[str, Any] = {
        "model_type": "gemma",
        "num_hidden_layers": 18,
        "hidden_size": 2048,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "intermediate_size": 16384,
        "vocab_size": 256000,
    }
    # The published 2.51 billion.
    assert ModelShape.from_config(gemma).parameters / 1e9 == pytest.approx(2.51, rel=0.005)
    for config in (gemma, {"text_config": gemma}):
        (advice,) = ParallelDims(pp=2, dp_shard=1).check(config)
        assert advice.rule == "tied-pp"
    apart = {**gemma, "tie_word_embeddings": False}
    assert ModelShape.from_config(apart).parameters / 1e9 == pytest.approx(3.03, rel=0.005)
    assert not ParallelDims(pp=2, dp_shard=1).check(apart)


def test_embeddings_are_tied_as_the_configuration_classes_of_transformers_have_it() -> None:
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto import configuration_auto, modeling_auto

    wrong, read = [], 0
    for family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            default = configuration_auto.CONFIG_MAPPING[family]().to_dict()
        except (KeyError, StrictDataclassError):  # no configuration, or none by default
            continue
        if "text_config" in default:  # one of several parts, each with a family of its own
            continue
        try:
            tied = ModelShape.from_config(default).tied
        except ParallelDimsError:  # layers that have no price
            continue
        read += 1
        if ModelShape.from_config({**DENSE, "model_type": family}).tied != tied:
            wrong.append(family)
    assert not wrong
    assert read > 50


def test_falcon_of_the_newer_architecture_has_the_kv_heads_that_it_names() -> None:
    config = {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "multi_query": True,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    }
    assert ModelShape.from_config(config).kv_heads == 8
    assert ModelShape.from_config({**config, "new_decoder_architecture": False}).kv_heads == 1


def test_latent_attention_has_as_many_kv_heads_as_heads_by_name_and_by_file() -> None:
    read = ModelShape.from_config(transformers.DeepseekV3Config())
    for model in (read, MODELS["deepseek-v3"]):
        assert model.to_config()["num_key_value_heads"] == model.heads == 128
        assert model.kv_width == 2 * 512
    wide = ParallelDims(tp=32, world_size=32)
    reports = [wide.check(c, 4096) for c in (transformers.DeepseekV3Config(), read.to_config())]
    assert [report.errors for report in reports] == [(), ()]


def test_every_field_that_a_configuration_lacks_is_named() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ModelShape.from_config({"hidden_size": 64, "vocab_size": 8})
    missing = [name for violation in caught.value.violations for name in violation.values]
    assert missing == ["layers", "heads", "ffn"]


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "moe_intermediate_size", "n_shared_experts", "kv_lora_rank"]
)
@pytest.mark.parametrize("value", [{"a": 1}, "8", -1, 2.5])
def test_a_size_that_is_no_number_is_named_wherever_it_is_used(name: str, value: object) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2}
    config = {**SMALL, **experts, "intermediate_size": 96, "v_head_dim": 16}
    assert ModelShape.from_config(config).experts == 4
    with pytest.raises(ParallelDimsError, match=r"given; use an integer of at least [01]"):
        ModelShape.from_config({**config, name: value})


def test_the_rules_and_the_planner_read_the_same_fields() -> None:
    llama4 = {
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "vocab_size": 202048,
    }
    widths = {e.rule: e.values for e in ParallelDims(tp=2, etp=2, world_size=2).explain(llama4)}
    assert widths["ffn-tp"]["intermediate_size_mlp"] == 16384
    assert widths["expert-ffn-etp"]["intermediate_size"] == 8192
    (odd,) = ParallelDims(tp=5, world_size=5).check({**GPT2, "n_head": 5, "vocab_size": 5}, 5)
    assert str(odd).startswith("tp=5 does not divide ffn=3072")
    dbrx = transformers.DbrxConfig(
        d_model=6144,
        n_heads=48,
        n_layers=40,
        vocab_size=100352,
        attn_config={"kv_n_heads": 8},
        ffn_config={"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
    )
    found = ModelShape.from_config(dbrx)
    assert (found.kv_heads, found.experts, found.top_k, found.ffn) == (8, 16, 4, 10752)
    # The published 132 billion.
    assert found.parameters / 1e9 == pytest.approx(132, rel=0.01)


def test_integers_of_other_types_are_sizes_under_every_name() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "ffn": 96}
    other: dict[str, Any] = {name: np.int64(size) for name, size in sizes.items()}
    assert ModelShape(**other) == ModelShape.from_config(other) == ModelShape(**sizes)
    (violation,) = ParallelDims(tp=3, world_size=3).check({"heads": np.int64(4), "ffn": 96}, 3)
    assert violation.rule == "heads-tp"


def test_latent_attention_has_the_parameters_of_its_own_projections() -> None:
    # In billions, from the models' own pages: DeepSeek-V3 and DeepSeek-V2-Lite.
    read = ModelShape.from_config(transformers.DeepseekV3Config())
    assert read.parameters == MODELS["deepseek-v3"].parameters
    assert read.parameters / 1e9 == pytest.approx(671, rel=0.001)
    assert 37 < read.active_parameters / 1e9 < 38
    lite = {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
    assert ModelShape.from_config(lite).parameters / 1e9 == pytest.approx(15.7, rel=0.005)
    # Another name of the experts of a token, as Ernie has it, or all names that were looked for.
    moe_k = {**lite, "moe_k": lite["num_experts_per_tok"], "num_experts_per_tok": None}
    assert ModelShape.from_config(moe_k) == ModelShape.from_config(lite)
    with pytest.raises(ParallelDimsError, match=r"has no top_k; give num_experts_per_tok, .*moe_k"):
        ModelShape.from_config({**lite, "num_experts_per_tok": None})


FALCON_H1 = {"layers_block_type": ["attention"] * 4, "mamba_d_ssm": 1024}
DENSE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mamba_d_state": 16, "attn_layer_period": 8}, ["mamba_d_state", "attn_layer_period"]),
        ({"linear_num_value_heads": 32, "full_attention_interval": 4}, ["linear_num_value_heads"]),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, ["layer_types"]),
        ({"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}, ["conv_L_cache"]),
        ({"attn_type_list": [0, 0, 0, 1]}, ["attn_type_list"]),
        ({"hybrid_override_pattern": "M-M*"}, ["hybrid_override_pattern"]),
        ({"block_types": ["recurrent", "attention"], "lru_width": 64}, ["block_types"]),
        (FALCON_H1, ["mamba_d_ssm"]),
        ({"block_configs": [{"attention": {"no_op": True}}]}, ["block_configs"]),
        ({"index_topk": 2048}, ["index_topk"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layers_without_a_price_are_refused_and_their_fields_named(
    fields: dict[str, Any], named: list[str], nested: bool
) -> None:
    config = {**DENSE, **fields}
    with pytest.raises(ParallelDimsError, match="the estimates do not cover") as caught:
        ModelShape.from_config({"text_config": config} if nested else config)
    assert {name for v in caught.value.violations for name in v.values} >= {*named}
    # The rules of degrees read what they know all the same.
    assert not ParallelDims(tp=2, world_size=2).check(config).errors


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"layer_types": ["attention"] * 4, "mamba_d_state": 256, "mamba_n_heads": 128},
        {"attn_type_list": [1, 1, 1, 1]},
        {"is_encoder_decoder": False, "mamba_d_state": None, "attn_layer_indices": []},
    ],
)
def test_fields_of_other_layers_in_a_model_that_has_none_are_no_matter(
    fields: dict[str, Any],
) -> None:
    assert ModelShape.from_config({**DENSE, **fields}) == ModelShape.from_config(DENSE)


@pytest.mark.parametrize(
    "name",
    [
        *("Bamba", "FalconH1", "Jamba", "KimiLinear", "MiniMax", "NemotronH"),
        *("OlmoHybrid", "Qwen3Next", "RecurrentGemma", "Zamba", "Zamba2", "DeepseekV32"),
        *("Mamba", "Mamba2", "FalconMamba", "GraniteMoeHybrid", "Rwkv", "xLSTM", "T5"),
    ],
)
def test_no_configuration_of_transformers_with_other_layers_is_read_as_a_decoder(name: str) -> None:
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this version of transformers has no {name}")
    with pytest.raises(ParallelDimsError):
        ModelShape.from_config(kind())


def test_the_layers_of_a_configuration_decide_where_its_family_has_both_kinds() -> None:
    with pytest.raises(ParallelDimsError, match=r"layer_types=\['conv'\]"):
        ModelShape.from_config(transformers.Lfm2Config(full_attn_idxs=[2, 5]))
    assert ModelShape.from_config(transformers.Lfm2Config()).layers == 32


def test_layers_without_experts_are_counted_by_the_words_of_each_layer() -> None:
    config = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    types = ["dense", "sparse", "sparse", "sparse"]
    assert ModelShape.from_config({**config, "mlp_layer_types": types}).dense_layers == 1


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"decoder_sparse_step": 2}, 2),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0]}, 2),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 1]}, 3),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [2, 3]}, 2),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"first_k_dense_replace": 1, "mlp_only_layers": [0, 3]}, 2),
    ],
)
def test_a_layer_without_experts_is_counted_once(fields: dict[str, Any], dense: int) -> None:
    config = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert ModelShape.from_config({**config, **fields}).dense_layers == dense


@pytest.mark.parametrize(
    ("fields", "legal"),
    [
        ({"tie_word_embeddings": "yes"}, "True or False"),
        ({"tie_word_embeddings": "false"}, "True or False"),
        ({"tie_word_embeddings": 1}, "True or False"),
        ({"mlp_only_layers": "x"}, "a list of integers from 0 to 3"),
        ({"mlp_only_layers": ["a"]}, "a list of integers from 0 to 3"),
        ({"mlp_only_layers": [100]}, "a list of integers from 0 to 3"),
        ({"mlp_only_layers": [0, 7]}, "a list of integers from 0 to 3"),
        ({"mlp_only_layers": 3}, "a list of integers from 0 to 3"),
        ({"decoder_sparse_step": 0}, "a positive integer"),
        ({"mlp_layer_types": 5}, "a list of 4 types"),
        ({"layer_types": 5}, "a list of 4 types"),
        ({"layer_types": ["full_attention"] * 3}, "a list of 4 types"),
    ],
)
def test_a_field_that_is_no_number_has_its_type_and_length(
    fields: dict[str, Any], legal: str
) -> None:
    config = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ((name, value),) = fields.items()
    message = f"^{name}={re.escape(repr(value))} given; use {legal}"
    with pytest.raises(ParallelDimsError, match=message):
        ModelShape.from_config({**config, **fields})
    if name in ("mlp_only_layers", "decoder_sparse_step", "mlp_layer_types"):
        dense = ModelShape.from_config(DENSE)  # a model without experts does not read the field
        assert ModelShape.from_config({**DENSE, **fields}) == dense


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "architectures"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "architectures"),
        ({"model_type": "vit", "vocab_size": None}, "model_type"),
        ({"model_type": "x", "architectures": ["XForImageClassification"]}, "architectures"),
        ({"model_type": "distilbert"}, "model_type"),
    ],
)
def test_an_encoder_is_refused_by_its_classes_or_its_family(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ParallelDimsError, match="an encoder, which the estimates") as caught:
        ModelShape.from_config({**DENSE, **fields})
    assert [*caught.value.violations[0].values] == [named]


@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM"])
def test_a_decoder_of_a_family_of_encoders_is_read(name: str) -> None:
    config = {**DENSE, "model_type": "bert", "architectures": [name]}
    assert ModelShape.from_config(config).layers == 4


def test_messages_have_the_names_and_the_least_values_of_the_file() -> None:
    with pytest.raises(ParallelDimsError, match=r"num_attention_heads=-32 .* of at least 1$"):
        ModelShape.from_config({**DENSE, "num_attention_heads": -32})
    config = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2, 3]}
    message = r"^dense_layers=4 given; use 0 to 3 \(dense_layers is read from mlp_only_layers\)$"
    with pytest.raises(ParallelDimsError, match=message):
        ModelShape.from_config(config)
    with pytest.raises(ParallelDimsError, match=r"kv_heads is read from num_key_value_heads\)$"):
        ModelShape.from_config({**DENSE, "num_key_value_heads": 3})
