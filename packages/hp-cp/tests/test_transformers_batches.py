"""Batches of `shard_batch` that say documents in other ways than ``[batch, sequence]`` ids."""

import copy
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_cp import Greedy, InputError, MaskSpec
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

transformers = pytest.importorskip("transformers")

from .causal_models import causal_model, small  # noqa: E402
from .test_hugging_face import (  # noqa: E402
    BOUND,
    Run,
    error_of,
    exact,
    gradients_of,
    one_rank,
    summed,
)

SEQ_LEN = 24
DOCUMENTS = ((0, 11, SEQ_LEN), (0, 5, 6, SEQ_LEN))
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# They take text positions in front of those of images: [4, batch, sequence].
IMAGE_MODELS = ("Qwen2_5_VLText", "Qwen3VLText", "Glm4vText", "PaddleOCRText")


def ids_of(rows: int) -> Tensor:
    return torch.randint(3, 50, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def text_positions(rows: int = 2) -> Tensor:
    """Return ids ``[rows, sequence]`` that start at 0 in each document."""
    lengths = [[b - a for a, b in pairwise(ends)] for ends in DOCUMENTS[:rows]]
    return torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])


def image_positions(text: Tensor) -> Tensor:
    """Return ids ``[4, rows, sequence]``: of text, and time, height and width of images."""
    return torch.stack([text, text // 4, text % 4 // 2, text % 2])


def image_model(name: str, **rope: Any) -> Any:
    config_class = getattr(transformers, f"{name}Config")
    options = {**small(config_class()), "head_dim": 8, "rope_parameters": {**ROPE, **rope}}
    options["max_position_embeddings"] = 8
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(
        config_class(**options, attn_implementation="eager")
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double().train()


def run(model: Any, batch: Mapping[str, Any]) -> Run:
    """Return the sum of the squares of this rank's rows, and its gradients."""
    loss = model(**batch)[0].square().sum()
    loss.backward()
    return loss.detach(), gradients_of(model)


def simulated(model: Any, batch: Mapping[str, Any], **options: Any) -> Run:
    def rank(rank: int, collectives: SimulatedCollectives) -> Run:
        mesh, layout = collectives.mesh((2,), ("cp",)), Greedy(2)
        mine = context_parallel(copy.deepcopy(model), mesh, layout=layout, collectives=collectives)
        return run(mine, shard_batch(batch, mesh, layout, **options))

    return summed(SimulatedWorld(2).run(rank))


def alone(model: Any, batch: Mapping[str, Any]) -> Run:
    return run(copy.deepcopy(model), {**batch, "use_cache": False})


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_documents_are_those_of_the_text_row_of_position_ids(name: str, rows: int) -> None:
    model = image_model(name)
    embeds = torch.randn(rows, SEQ_LEN, 32, dtype=torch.float64)
    batch = {"inputs_embeds": embeds, "position_ids": image_positions(text_positions(rows))}
    with exact():
        assert error_of(simulated(model, batch), alone(model, batch)) <= BOUND


def test_heights_and_widths_that_start_again_start_no_document() -> None:
    """Those of an image are 0 in several tokens of one document."""
    mesh, _ = one_rank()
    ids = image_positions(torch.arange(SEQ_LEN)[None])
    for positions in (ids, ids[1:]):
        batch = {"input_ids": ids_of(1), "position_ids": positions}
        assert shard_batch(batch, mesh)["sequence_shard"].mask.cu_seqlens is None


@pytest.mark.parametrize("axes", [1, 2, 3, 5])
def test_documents_in_position_ids_without_a_text_row_are_refused(axes: int) -> None:
    mesh, _ = one_rank()
    positions = text_positions(1).expand(axes, 1, -1)
    batch: dict[str, Any] = {"input_ids": ids_of(1), "position_ids": positions}
    said = (
        rf"position_ids of shape \({axes}, 1, 24\) start again at token 11 of row 0, .*"
        r"row 0 of \[4, batch, sequence\].*cu_seqlens=\.\.\.\), \(0, 24\) for a single one"
    )
    with pytest.raises(InputError, match=said):
        shard_batch(batch, mesh)
    with pytest.raises(InputError, match="the mask has no documents, but position_ids of the ba"):
        shard_batch(batch, mesh, mask=MaskSpec(causal=True))
    ones = torch.ones(1, SEQ_LEN, dtype=torch.int64)
    assert shard_batch({**batch, "attention_mask": ones}, mesh)["position_ids"].shape[0] == axes
    for ends in (DOCUMENTS[0], (0, SEQ_LEN)):
        mask = MaskSpec(causal=True, cu_seqlens=ends)
        assert shard_batch(batch, mesh, mask=mask)["sequence_shard"].mask is mask


def test_rotary_embeddings_are_scaled_by_the_axes_of_images_alone() -> None:
    """An image has fewer positions than tokens, so that those of the text are larger."""
    model = image_model("Qwen2_5_VLText", rope_type="dynamic", factor=2.0)
    positions = image_positions(torch.arange(SEQ_LEN)[None])
    positions[1:] += 4
    batch = {"input_ids": ids_of(1), "position_ids": positions}
    with exact():
        assert error_of(simulated(model, batch), alone(model, batch)) <= BOUND


def test_documents_given_as_a_mask_are_those_of_the_text_row() -> None:
    model = image_model("Qwen3VLText")
    embeds = torch.randn(2, SEQ_LEN, 32, dtype=torch.float64)
    expected = {"inputs_embeds": embeds, "position_ids": image_positions(text_positions())}
    batch = {"inputs_embeds": embeds, "position_ids": image_positions(text_positions())[1:]}
    mask = MaskSpec(causal=True, cu_seqlens=DOCUMENTS)
    with exact():
        assert error_of(simulated(model, batch, mask=mask), alone(model, expected)) <= BOUND


def test_position_ids_of_one_dim_start_documents_of_all_rows() -> None:
    model = causal_model("gpt2")
    batch = {"input_ids": ids_of(2), "position_ids": text_positions(1)[0]}
    with exact():
        assert error_of(simulated(model, batch), alone(model, batch)) <= BOUND


@pytest.mark.parametrize(
    "positions", [image_positions(text_positions(1)), text_positions(1).expand(3, 1, -1)]
)
def test_image_positions_of_documents_without_a_shard_are_refused(positions: Tensor) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    model = context_parallel(image_model("Qwen2_5_VLText"), mesh)
    with pytest.raises(InputError, match=r"packed documents, but without|start again at token 11"):
        model(input_ids=ids_of(1), position_ids=positions)


@pytest.mark.parametrize("value", [2, -1, 0.5])
def test_an_attention_mask_that_numbers_documents_is_refused(value: float) -> None:
    """The library reads each of its values but 0 as a token that all of the row may see."""
    mesh, collectives = one_rank()
    seen = torch.ones(1, SEQ_LEN, dtype=torch.tensor(value).dtype)
    seen[:, 11:] = value
    said = rf"has the value {value}, but its values are 0 .*cu_seqlens=\.\.\.\)"
    with pytest.raises(InputError, match=said):
        shard_batch({"input_ids": ids_of(1), "attention_mask": seen}, mesh)
    model = context_parallel(causal_model("llama"), mesh, collectives=collectives)
    part = shard_batch({"input_ids": ids_of(1)}, mesh)
    with pytest.raises(InputError, match=said):
        model(**{**part, "attention_mask": seen[:, -SEQ_LEN // 2 :]})
    alone = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    model = context_parallel(causal_model("llama"), alone)
    for args, kwargs in (((), {"attention_mask": seen}), ((seen,), {})):
        with pytest.raises(InputError, match=said):
            model(ids_of(1), *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_an_attention_mask_of_zeros_and_ones_may_have_any_dtype(dtype: torch.dtype) -> None:
    mesh, _ = one_rank()
    seen = (torch.arange(SEQ_LEN) < 20)[None].to(dtype)
    part = shard_batch({"input_ids": ids_of(1), "attention_mask": seen}, mesh)
    assert part["sequence_shard"].padded


@pytest.mark.parametrize("ends", [None, (0, 11, SEQ_LEN)])
def test_windows_over_both_sides_are_refused_for_what_they_are(ends: Any) -> None:
    """ModernBERT counts its window otherwise than its mask, which is not why it is refused."""
    mesh, collectives = one_rank()
    config = transformers.ModernBertConfig
    kinds = ["sliding_attention", "full_attention"]
    options = {**small(config()), "layer_types": kinds, "attn_implementation": "eager"}
    model = transformers.ModernBertModel(config(**options)).eval()
    context_parallel(model, mesh, collectives=collectives)
    mask = MaskSpec(causal=True, cu_seqlens=ends)
    with pytest.raises(InputError, match="has a window over both sides"):
        model(**shard_batch({"input_ids": ids_of(1)}, mesh, mask=mask))
