"""What is read of every family of transformers, against the parameters of its own models."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hp_mesh import ParallelDims, ParallelDimsError
from hp_mesh.planner import ModelShape

from .plan_strategies import SMALL

# What decoders of text do not have is not counted: positions that are learned, words of a second
# kind, projections of the embedding, and pictures or sounds beside the text. LFM2 without
# convolutions, which no file has, makes its feed-forward parts smaller.
MORE_THAN_A_DECODER = {
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "git", "lfm2", "opt"),
    *("phi4_multimodal", "rembert", "roc_bert", "xlm-roberta", "xmod"),
}


def families() -> Iterator[tuple[str, Any]]:
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            yield name, transformers.CONFIG_MAPPING[name]()
        except Exception:  # noqa: BLE001 (some need values)
            continue


def parameters(config: Any) -> int | None:
    """Return those of the library's model, None where its defaults make none."""
    try:
        with torch.device("meta"):
            kind: Any = transformers.AutoModelForCausalLM
            model: torch.nn.Module = kind.from_config(config.get_text_config())
    except Exception:  # noqa: BLE001
        return None
    return sum(each.numel() for each in model.parameters())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_family_has_the_parameters_of_its_models_or_is_refused() -> None:
    counted, wrong = 0, {}
    for name, config in families():
        try:
            own = ModelShape.from_config(config).parameters
        except ParallelDimsError:
            continue
        expected = None if name in MORE_THAN_A_DECODER else parameters(config)
        if expected is not None:
            counted += 1
            if abs(own / expected - 1) > 0.01:
                wrong[name] = own / expected - 1
    assert wrong == {}
    assert counted > 60


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("jetmoe", "experts in attention"),
        ("longcat_flash", "two attentions in a layer"),
        ("gemma4_text", "heads of several sizes"),
    ],
)
def test_layers_that_their_fields_do_not_tell_are_refused_by_family(family: str, told: str) -> None:
    with pytest.raises(ParallelDimsError, match=told):
        ModelShape.from_config(transformers.CONFIG_MAPPING[family]())
    assert ParallelDims(world_size=1).check(transformers.CONFIG_MAPPING[family]()).errors == ()


@pytest.mark.parametrize(
    ("fields", "experts", "shared", "width"),
    [
        ({"num_experts": 4, "num_shared_expert": 2}, 4, 192, 96),
        ({"num_experts": 4, "moe_num_shared_experts": 1, "moe_ffn_hidden_size": 32}, 4, 32, 32),
        ({"num_experts": 4, "moe_shared_expert_intermediate_size": 40}, 4, 40, 96),
        ({"num_experts": 4, "expert_ffn_hidden_size": 24}, 4, 0, 24),
        ({"num_experts": 4, "is_moe": False}, 0, 0, 96),
        ({"num_experts": 4, "is_moe": True}, 4, 0, 96),
    ],
)
def test_experts_are_read_by_the_names_of_every_family(
    fields: dict[str, Any], experts: int, shared: int, width: int
) -> None:
    config = {**SMALL, "intermediate_size": 96, "num_experts_per_tok": 2}
    shape = ModelShape.from_config({**config, **fields})
    assert (shape.experts, shape.shared_ffn, shape.expert_ffn) == (experts, shared, width)
