"""Models of transformers: what cannot be spread."""

from typing import Any

import pytest

from train.config import ModelError, TransformersConfig, read_model
from train.hugging_face import build_transformers

pytest.importorskip("transformers")


def _tiny(**fields: Any) -> TransformersConfig:
    known = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    return TransformersConfig(
        fields={"model_type": "llama", "intermediate_size": 16, **known, **fields},
        numbers={},
        tp_plan={},
    )


def test_a_model_that_the_library_cannot_make_is_named() -> None:
    with pytest.raises(ModelError, match="no causal language model of this llama: Padding_idx"):
        build_transformers(_tiny(pad_token_id=99), 0)


def test_a_configuration_brings_the_plan_of_its_layers() -> None:
    found = read_model("llama-tiny")
    assert isinstance(found, TransformersConfig)
    assert found.tp_plan["layers.*.self_attn.o_proj"] == "rowwise"
    assert found.with_vocabulary(512).vocab_size == 512
