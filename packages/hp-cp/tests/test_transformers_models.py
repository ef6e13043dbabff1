"""Models for causal language modelling equal those of one process over ranks, or are refused."""

import copy
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_cp import InputError, Zigzag
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor import RecordingCollectives, TorchCollectives

from .strategies import cp_mesh

transformers = pytest.importorskip("transformers")

from .causal_models import TYPES, VOCAB, causal_model  # noqa: E402
from .test_hugging_face import Run, exact, gradients_of, one_rank, tokens  # noqa: E402

SEQ_LEN = 64
DOCUMENTS = (0, 13, 40, SEQ_LEN)
BOUND = 1e-10
# Sums scores of its lambdas in float32, whatever the model's dtype.
BOUNDS = {"diffllama": 1e-5}
FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
NO_ROTARY = {"no_rope_layers": [1, 0], "moe_layers": [1]}
# What is of interest in each: positions, shared keys and values, bounds, layers without positions.
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("gpt2", {}),
    "positions with an offset": ("opt", {}),
    "positions of a decoder": ("whisper", {}),
    "queries scaled by position": ("ministral3", {}),
    "layers without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "windows with, whole without positions": ("cohere2", {}),
    "keys of earlier layers": ("gemma4_text", {}),
    "keys of earlier layers, sparse": ("gemma3n_text", {}),
    "two attentions in a layer": ("longcat_flash", {}),
    "sinks": ("granitemoe_swa", {}),
    "causal encoder": ("bert", {"is_decoder": True}),
}
TAKES_NONE = "takes no position_ids: each rank would count"
OWN = "counts positions from the pad_token_id on, and shard_batch counts from 0"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "BART": ("bart", {}, TAKES_NONE),
    "sinusoids": ("marian", {}, TAKES_NONE),
    "positions from padding on": ("roberta", {}, OWN),
    "a mask it computes with": ("doge", {}, "computes with its mask, of which it takes dtype"),
    "scores scaled by its own rows": (
        "llama4_text",
        {**FULL, **NO_ROTARY, "floor_scale": 16, "attn_scale": 0.3},
        "Llama4TextAttention counts rows itself",
    ),
    "sparse by blocks": (
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse", "full_attention"]},
        "has minimax_m3_sparse",
    ),
    "convolutions": ("lfm2", {}, "has conv, convolutions"),
    "recurrence": ("rwkv", {}, "has recurrent layers"),
    "chunks": ("llama4_text", {}, "has chunked_attention"),
    "an indexer": ("deepseek_v32", {}, "has indexed_attention"),
    "no registry": ("mpt", {}, "takes its attention from the registry"),
    "arguments not handed on": ("nemotron", {}, "does not hand keyword arguments on"),
}
# They take keys of another model, want other libraries, or cannot be made small in this version.
NOT_MADE = {"dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "zamba"}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def packed() -> dict[str, Tensor]:
    lengths = [b - a for a, b in pairwise(DOCUMENTS)]
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    ids = batch()["input_ids"]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def padded() -> dict[str, Tensor]:
    seen = torch.ones(2, SEQ_LEN, dtype=torch.int64)
    seen[0, 50:] = 0
    ids = batch()["input_ids"]
    labels = ids.masked_fill(seen == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": seen}


BATCHES = {"whole": batch, "packed": packed, "padded": padded}


def share_of_loss(model: Any, given: Mapping[str, Any]) -> Tensor:
    """Return the sum of the losses of the next tokens over the number of those of all ranks.

    Where the model takes them, its own loss gives this too; not all take what makes it a share.
    """
    rest = dict(given)
    labels = rest.pop("labels")
    targets = rest.pop("shift_labels", F.pad(labels, (0, 1), value=-100)[:, 1:])
    count: Tensor = rest.pop("num_items_in_batch", (targets != -100).sum())
    logits: Tensor = model(**rest).logits.flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / count


def gradients(model: Any, loss: Tensor) -> Run:
    loss.backward()
    return loss.detach(), gradients_of(model)


def parameters_of(model: Any) -> Any:
    return inspect.signature(inspect.unwrap(type(model).forward)).parameters


def alone(model: Any, given: Mapping[str, Any]) -> Run:
    """Return what one process has, document by document: not all models look for them."""
    model = copy.deepcopy(model)
    taken = parameters_of(model)
    options = {"use_cache": False} if "use_cache" in taken else {}
    if "position_ids" not in given:
        return gradients(model, share_of_loss(model, {**given, **options}))
    count = (given["labels"][:, 1:] != -100).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for a, b in pairwise(DOCUMENTS):
        part = {key: x[:, a:b] for key, x in given.items() if key in {*taken, "labels"}}
        loss = loss + share_of_loss(model, {**part, **options, "num_items_in_batch": count})
    return gradients(model, loss)


def error_of(found: Run, expected: Run) -> float:
    """Return the largest error; of gradients that vanish relative to the largest one."""
    (loss, grads), (true_loss, true_grads) = found, expected
    least = 1e-6 * max(float(x.norm()) for x in true_grads.values())
    errors = [float((loss - true_loss).abs() / true_loss.abs())]
    for name in grads.keys() | true_grads.keys():
        x, right = grads.get(name, torch.zeros(())), true_grads.get(name, torch.zeros(()))
        errors.append(float((x - right).norm() / max(float(right.norm()), least)))
    return float(torch.tensor(errors).max())  # a nan stays one


def over_ranks(model: Any, given: Mapping[str, Any], collectives: Any) -> Run:
    """Return loss and gradients summed over real ranks."""
    mesh, layout = cp_mesh(2), Zigzag()
    context_parallel(model, mesh, layout=layout, collectives=collectives)
    loss, own = gradients(model, share_of_loss(model, shard_batch(given, mesh, layout)))
    # One rank alone may have a gradient, as of an expert.
    grads = {name: own.get(name, torch.zeros_like(x)) for name, x in model.named_parameters()}
    for x in (loss, *grads.values()):
        torch.distributed.all_reduce(x)
    return loss, grads


def on_rank(rank: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the error of each model and batch, or what was raised and the bytes sent before."""
    found: list[dict[str, Any]] = []
    for model_type, options in cases:
        model = causal_model(model_type, **options)
        answers: dict[str, Any] = {}
        for name, make in BATCHES.items():
            record = RecordingCollectives(TorchCollectives())
            with exact():
                try:
                    run = over_ranks(copy.deepcopy(model), make(), record)
                except InputError as error:
                    sent = sum(traffic.bytes for traffic in record.by_axis.values())
                    answers[name] = (str(error), sent)
                else:
                    answers[name] = error_of(run, alone(model, make()))
        found.append(answers)
    return found


@pytest.mark.slow
def test_models_of_each_kind_have_what_one_process_has(ranks: Any) -> None:
    for answers in ranks(2).run(on_rank, list(EQUAL.values())):
        for kind, found in zip(EQUAL, answers, strict=True):
            assert set(found) == set(BATCHES)
            assert all(type(x) is float and x <= BOUND for x in found.values()), (kind, found)


@pytest.mark.slow
def test_models_of_each_kind_are_refused_before_anything_is_sent(ranks: Any) -> None:
    cases = [(model_type, options) for model_type, options, _ in REFUSED.values()]
    for answers in ranks(2).run(on_rank, cases):
        for (kind, (*_, message)), found in zip(REFUSED.items(), answers, strict=True):
            said, sent = found["whole"]
            assert message in said, kind
            assert sent == 0


def test_models_that_count_from_padding_on_take_positions_that_are_given(ranks: Any) -> None:
    cases: list[Any] = [(name, {}) for name in ("roberta", "xlm-roberta-xl", "data2vec-text")]
    for answers in ranks(2).run(on_rank, cases):
        assert all(found["packed"] <= BOUND for found in answers)


@pytest.mark.parametrize("kept", [1, torch.tensor([0, 3])])
def test_rows_of_the_logits_are_not_counted_over_ranks(kept: Any) -> None:
    mesh, collectives = one_rank()
    model = context_parallel(causal_model("llama"), mesh, collectives=collectives)
    part = shard_batch({"input_ids": tokens()}, mesh)
    with pytest.raises(InputError, match="logits_to_keep counts rows of the whole sequence"):
        model(**part, logits_to_keep=kept)


def test_a_model_with_two_text_configs_is_refused() -> None:
    mesh, _ = one_rank()
    part = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "ffn_dim": 40}
    text = {"model_type": "t5", "d_model": 32, "d_ff": 40, "num_layers": 1, "num_heads": 4}
    audio = {"model_type": "encodec", "num_filters": 4, "hidden_size": 8, "codebook_dim": 8}
    config = transformers.MusicgenConfig(text_encoder=text, audio_encoder=audio, decoder=part)
    with torch.device("meta"):
        model = transformers.MusicgenForConditionalGeneration(config)
    with pytest.raises(InputError, match="an encoder"):
        context_parallel(model, mesh)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
def test_every_type_of_model_is_equal_or_refused(ranks: Any, part: int) -> None:
    """Also of a later version of the library: what is new must be one or the other."""
    names = sorted(set(TYPES) - NOT_MADE)[part::8]
    answers = ranks(2).run(on_rank, [(name, {}) for name in names])
    wrong = {}
    for of_rank in answers:
        for name, found in zip(names, of_rank, strict=True):
            for key, x in found.items():
                right = x <= BOUNDS.get(name, BOUND) if type(x) is float else x[1] == 0
                if not right:
                    wrong[name, key] = x
    assert not wrong
