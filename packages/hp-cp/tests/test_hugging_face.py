"""Models of Hugging Face transformers with `context_parallel` equal the models in one process."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_cp import Contiguous, Greedy, InputError, MaskSpec, PerDocument, Zigzag
from hp_cp.transformers import context_parallel, shard_batch
from hp_dtensor.testing import SimulatedCollectives, SimulatedWorld

from .strategies import cp_mesh

transformers = pytest.importorskip("transformers")

SEQ_LEN = 37
VOCAB = 50
BOUND = 1e-10
Run = tuple[Tensor, dict[str, Tensor]]  # the loss and the gradients
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
ALTERNATING = {
    "sliding_window": 9,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Mistral": {"sliding_window": 7, "head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Gemma3": ALTERNATING,
    "Gemma2": {**ALTERNATING, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    "GptOss": {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama": {"layout": Zigzag()},
    "Qwen3": {"layout": Zigzag(), "schedule": "ring"},
    "Qwen3Moe": {"layout": Zigzag(), "ulysses_degree": 2},
    "Mistral": {"layout": Contiguous()},
    "Olmoe": {"layout": Zigzag(), "schedule": "gather"},
    "Gemma3": {"layout": Greedy(3)},
    "Gemma2": {"layout": Zigzag(), "schedule": "ring"},
    "GptOss": {"layout": Zigzag(), "ulysses_degree": 2},
    "DeepseekV3": {"layout": Zigzag(), "schedule": "ring"},
}


@contextmanager
def exact() -> Iterator[None]:
    """Let the library's models compute in float64 what they cast to float32."""
    softmax, float32, cast, to = F.softmax, Tensor.float, Tensor.type, Tensor.to

    def kept_softmax(
        x: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    def kept(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else float32(x)

    def kept_type(x: Tensor, *dtype: Any) -> Any:
        return x if (x.dtype, *dtype) == (torch.float64, torch.float32) else cast(x, *dtype)

    def kept_to(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {*args, *kwargs.values()}
        return x if (x.dtype, given) == (torch.float64, {torch.float32}) else to(x, *args, **kwargs)

    with (
        patch.object(F, "softmax", kept_softmax),
        patch.object(Tensor, "to", kept_to),
        patch.object(Tensor, "float", kept),
        patch.object(Tensor, "type", kept_type),
    ):
        yield


@pytest.fixture(autouse=True)
def exact_models() -> Iterator[None]:
    with exact():
        yield


def model_of(name: str, **options: Any) -> Any:
    """Return a small model in float64, the same in every process."""
    config_type = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    settings = {
        **SIZES,
        **MODELS.get(name, {}),
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        **options,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_type(**settings)).double().train()
    for parameter in model.parameters():  # the library makes zeros of some
        nn.init.normal_(parameter, std=0.2)
    return model


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def alone(model: Any, batch: Mapping[str, Any]) -> Run:
    """Return what one process has; with a cache it would not look for documents."""
    return losses_and_gradients(copy.deepcopy(model), {**batch, "use_cache": False})


def losses_and_gradients(model: Any, batch: Mapping[str, Any]) -> Run:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def summed(runs: Sequence[Run]) -> Run:
    """Return the sum over ranks of what each has."""
    loss = torch.stack([loss for loss, _ in runs]).sum(0)
    found = {name: torch.zeros_like(grad) for name, grad in runs[0][1].items()}
    for _, grads in runs:
        assert grads.keys() == found.keys()
        for name, grad in grads.items():
            found[name] += grad
    return loss, found


def simulated(
    model: Any,
    batch: Mapping[str, Any],
    n: int = 2,
    mask: MaskSpec | None = None,
    dropout_seed: int | None = None,
    **options: Any,
) -> Run:
    """Return loss and gradients, summed over simulated ranks."""

    def rank(rank: int, collectives: SimulatedCollectives) -> Run:
        mesh = collectives.mesh((n,), ("cp",))
        mine = copy.deepcopy(model)
        assert context_parallel(mine, mesh, collectives=collectives, **options) is mine
        layout = options.get("layout")
        part = shard_batch(batch, mesh, layout, mask=mask, dropout_seed=dropout_seed)
        return losses_and_gradients(mine, part)

    return summed(SimulatedWorld(n).run(rank))


def error_of(found: Run, expected: Run) -> float:
    """Return the largest relative error of the loss and of any gradient."""
    (loss, grads), (true_loss, true_grads) = found, expected
    assert grads.keys() == true_grads.keys()
    errors = [(loss - true_loss).abs() / true_loss.abs()]
    for name, grad in grads.items():
        errors.append((grad - true_grads[name]).norm() / true_grads[name].norm())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_process(name: str) -> None:
    model, batch = model_of(name), {"input_ids": tokens(), "labels": tokens()}
    assert error_of(simulated(model, batch, **OPTIONS[name]), alone(model, batch)) <= BOUND


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"layout": Zigzag(), "ulysses_degree": 2, "schedule": "ring"}),
        ("Gemma3", {"layout": Greedy(2), "schedule": "gather"}),
        ("Qwen3Moe", {"layout": Contiguous(), "ulysses_degree": 4}),
        ("GptOss", {"layout": Zigzag(), "ulysses_degree": 2, "schedule": "gather"}),
    ],
)
def test_four_ranks_have_what_one_process_has(name: str, options: dict[str, Any]) -> None:
    model, batch = model_of(name), {"input_ids": tokens(), "labels": tokens()}
    assert error_of(simulated(model, batch, 4, **options), alone(model, batch)) <= BOUND


DOCUMENTS = (0, 7, 8, 30, SEQ_LEN)


def by_document(model: Any, batch: Mapping[str, Tensor], ends: Sequence[int]) -> Run:
    """Return loss and gradients in one process that reads one document after the other."""
    model = copy.deepcopy(model)
    parts = [{key: x[:, a:b] for key, x in batch.items()} for a, b in pairwise(ends)]
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
    runs = [model(**part, num_items_in_batch=count).loss for part in parts]
    loss = torch.stack(runs).sum()
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"layout": PerDocument(), "schedule": "gather"}),
        ("Qwen3", {"layout": Zigzag(), "schedule": "gather"}),
        ("Qwen3Moe", {"layout": Zigzag()}),
        ("Mistral", {"layout": Zigzag(), "ulysses_degree": 2}),
        ("Gemma3", {"layout": Greedy(3), "schedule": "ring"}),
        ("Olmoe", {"layout": Contiguous()}),
        ("Gemma2", {"layout": Zigzag()}),
        ("GptOss", {"layout": Greedy(2), "schedule": "ring"}),
        ("DeepseekV3", {"layout": Zigzag(), "ulysses_degree": 2}),
    ],
)
def test_packed_documents_see_only_themselves(name: str, options: dict[str, Any]) -> None:
    model, batch = model_of(name), {"input_ids": tokens(), "labels": tokens()}
    mask = MaskSpec(causal=True, cu_seqlens=DOCUMENTS)
    found = simulated(model, batch, mask=mask, **options)
    assert error_of(found, by_document(model, batch, DOCUMENTS)) <= BOUND


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_documents_of_a_flattening_collator_are_found(given: str) -> None:
    """Its position ids start anew with each document, its labels ignore each first token."""
    lengths = [b - a for a, b in pairwise(DOCUMENTS)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = tokens(1)
    labels = ids.masked_fill(positions == 0, -100)
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels, "position_ids": positions}
    model = model_of("Llama")
    expected = alone(model, batch)
    if given == "cu_seq_lens_q":
        ends = torch.tensor(DOCUMENTS, dtype=torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    found = simulated(model, batch, layout=Greedy(2))
    assert error_of(found, expected) <= BOUND


@pytest.mark.parametrize("given", ["position_ids", "mask"])
@pytest.mark.parametrize("name", ["Qwen3", "Mistral"])
def test_each_row_of_a_batch_has_its_documents(name: str, given: str) -> None:
    ends = (DOCUMENTS, (0, 5, SEQ_LEN))
    lengths = [[b - a for a, b in pairwise(of_row)] for of_row in ends]
    positions = torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])
    ids = tokens(2)
    labels = ids.masked_fill(positions == 0, -100)
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels, "position_ids": positions}
    model = model_of(name)
    options: dict[str, Any] = {}
    expected = alone(model, batch)
    if given == "mask":
        del batch["position_ids"]
        options["mask"] = MaskSpec(causal=True, cu_seqlens=ends)
    assert error_of(simulated(model, batch, layout=Greedy(2), **options), expected) <= BOUND


def test_documents_that_start_at_another_position_than_zero_are_found() -> None:
    """As those of models that count from the ``pad_token_id`` on, and the rest of a document."""
    mesh, _ = one_rank()
    for starts, ends in (((2, 2, 2), (0, 7, 30, SEQ_LEN)), ((9, 0, 0), (0, 7, 30, SEQ_LEN))):
        lengths = [b - a for a, b in pairwise(ends)]
        parts = [a + torch.arange(n) for a, n in zip(starts, lengths, strict=True)]
        batch = {"input_ids": tokens(1), "position_ids": torch.cat(parts)[None]}
        assert shard_batch(batch, mesh)["sequence_shard"].mask.cu_seqlens == ends


JUMPING = {
    "skip": torch.arange(SEQ_LEN) * 2,
    "jump": torch.arange(SEQ_LEN) + 50 * (torch.arange(SEQ_LEN) >= 20),
    "repeat": torch.arange(SEQ_LEN) // 2,
    "decrease": torch.arange(SEQ_LEN).flip(0),
}


@pytest.mark.parametrize("name", JUMPING)
def test_position_ids_that_tell_documents_in_no_clear_way_are_refused(name: str) -> None:
    mesh, _ = one_rank()
    batch = {"input_ids": tokens(), "position_ids": JUMPING[name][None]}
    said = (
        r"position_ids of row 0 go from .*\(0, 37\) for a single one, or an attention_mask of ones"
    )
    with pytest.raises(InputError, match=said):
        shard_batch(batch, mesh)


@pytest.mark.parametrize("name", JUMPING)
@pytest.mark.parametrize("given", ["attention_mask", "mask"])
def test_position_ids_start_no_document_where_it_is_told(name: str, given: str) -> None:
    model, ones = model_of("Llama"), torch.ones(2, SEQ_LEN, dtype=torch.int64)
    batch = {"input_ids": tokens(), "labels": tokens(), "position_ids": JUMPING[name][None]}
    expected = alone(model, {**batch, "attention_mask": ones})
    if given == "attention_mask":
        found = simulated(model, {**batch, "attention_mask": ones}, layout=Zigzag())
    else:
        mask = MaskSpec(causal=True, cu_seqlens=(0, SEQ_LEN))
        found = simulated(model, batch, layout=Zigzag(), mask=mask)
    assert error_of(found, expected) <= BOUND


def test_beside_an_attention_mask_position_ids_start_no_document() -> None:
    """As in the library, whose labels of next tokens are then those of the whole row."""
    model, ones = model_of("Qwen3"), torch.ones(1, SEQ_LEN, dtype=torch.int64)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    batch = {"input_ids": tokens(1), "labels": tokens(1), "position_ids": positions}
    batch |= {"attention_mask": ones}
    assert error_of(simulated(model, batch, layout=Zigzag()), alone(model, batch)) <= BOUND


def test_a_mask_beside_other_documents_of_the_batch_is_refused() -> None:
    mesh, _ = one_rank()
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    batch: dict[str, Any] = {"input_ids": tokens(1), "position_ids": positions}
    with pytest.raises(
        InputError, match="position_ids of the batch start anew; leave out the mask"
    ):
        shard_batch(batch, mesh, mask=MaskSpec(causal=True))
    batch = {"input_ids": tokens(1), "cu_seq_lens_q": torch.tensor(DOCUMENTS)}
    for ends in (None, (0, SEQ_LEN)):
        with pytest.raises(InputError, match="other documents than cu_seq_lens_q of the batch"):
            shard_batch(batch, mesh, mask=MaskSpec(causal=True, cu_seqlens=ends))
    for rows in (DOCUMENTS, (DOCUMENTS,)):
        mask = MaskSpec(causal=True, cu_seqlens=rows)
        assert shard_batch(batch, mesh, mask=mask)["sequence_shard"].mask is mask


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (MaskSpec(causal=False, mask_mod=lambda b, h, i, j: j <= i), "a mask with a mask_mod"),
        (MaskSpec(causal=True, window=3), "a mask with a window, but windows are those of"),
    ],
)
def test_a_mask_that_no_layer_would_follow_is_refused(mask: MaskSpec, said: str) -> None:
    mesh, _ = one_rank()
    with pytest.raises(InputError, match=said):
        shard_batch({"input_ids": tokens()}, mesh, mask=mask)


def test_a_mask_that_is_not_causal_is_refused_by_causal_layers_only() -> None:
    mesh, collectives = one_rank()
    mask = MaskSpec(causal=False, cu_seqlens=(0, 9, SEQ_LEN))
    model = context_parallel(model_of("Llama"), mesh, collectives=collectives)
    with pytest.raises(InputError, match="is causal, but shard_batch was given a mask of causal=F"):
        model(**shard_batch({"input_ids": tokens()}, mesh, mask=mask))

    config = transformers.BertConfig(**SIZES, **EAGER, hidden_dropout_prob=0.0)
    encoder = transformers.BertModel(config, add_pooling_layer=False).double().eval()

    def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(encoder), mesh, collectives=collectives)
        part = shard_batch({"input_ids": tokens()}, mesh, mask=mask)
        found: Tensor = mine(**part).last_hidden_state
        return found

    whole = torch.cat(SimulatedWorld(2).run(rank), 1)
    expected = torch.cat(
        [encoder(part).last_hidden_state for part in tokens().split([9, 28], 1)], 1
    )
    torch.testing.assert_close(whole, expected, rtol=BOUND, atol=1e-12)


@pytest.mark.parametrize("by_name", [True, False])
def test_packed_documents_without_a_shard_are_refused_on_one_rank_too(by_name: bool) -> None:
    mesh = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    model = model_of("Llama")
    mine = context_parallel(copy.deepcopy(model), mesh)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
    packed = {"position_ids": positions} if by_name else {}
    args = () if by_name else (None, positions)
    with pytest.raises(
        InputError, match="position_ids of packed documents, but without a sequence"
    ):
        mine(tokens(1), *args, **packed)
    expected = model(tokens(1), position_ids=positions, use_cache=False).logits
    found = mine(**shard_batch({"input_ids": tokens(1), "position_ids": positions}, mesh)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(mine(tokens(1)).logits, model(tokens(1)).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["whole", "base"])
@pytest.mark.parametrize("by", ["method", "config"])
def test_another_attention_set_afterwards_is_refused(by: str, part: str) -> None:
    mesh, collectives = one_rank()
    model = context_parallel(model_of("Llama"), mesh, collectives=collectives)
    name = model.config._attn_implementation
    if by == "method":
        model.set_attn_implementation("sdpa")
    else:
        model.config._attn_implementation = "sdpa"
    batch = shard_batch({"input_ids": tokens()}, mesh)
    said = rf"was set to 'sdpa' after context_parallel, .*set_attn_implementation\('{name}'\)"
    with pytest.raises(InputError, match=said):
        (model if part == "whole" else model.model)(**batch)
    with pytest.raises(InputError, match=said):
        copy.deepcopy(model)(**batch)


def test_the_attention_may_be_set_back() -> None:
    model, batch = model_of("Llama"), {"input_ids": tokens(), "labels": tokens()}

    def rank(rank: int, collectives: SimulatedCollectives) -> Run:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(model), mesh, collectives=collectives)
        name = mine.config._attn_implementation
        mine.set_attn_implementation("sdpa")
        mine.set_attn_implementation(name)
        return losses_and_gradients(mine, shard_batch(batch, mesh))

    assert error_of(summed(SimulatedWorld(2).run(rank)), alone(model, batch)) <= BOUND


def test_a_batch_without_its_positions_is_refused() -> None:
    refused("Llama", "without its position_ids", {"position_ids": None})


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_other_rows_than_the_batch_is_refused(rows: int) -> None:
    mesh, _ = one_rank()
    mask = MaskSpec(causal=True, cu_seqlens=((0, SEQ_LEN),) * rows)
    with pytest.raises(InputError, match=f"documents of {rows} rows, but the batch has 2; give"):
        shard_batch({"input_ids": tokens()}, mesh, mask=mask)


def test_padding_at_the_end_of_rows_changes_nothing() -> None:
    ids, seen = tokens(), torch.ones(2, SEQ_LEN, dtype=torch.int64)
    seen[0, 20:] = 0
    labels = ids.masked_fill(seen == 0, -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": seen}
    model = model_of("Mistral")
    assert error_of(simulated(model, batch, layout=Zigzag()), alone(model, batch)) <= BOUND


def test_embeddings_and_a_mask_of_ones_may_be_given() -> None:
    model = model_of("Qwen3")
    embeds = torch.randn(2, SEQ_LEN, 32, dtype=torch.float64)
    ones = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    batch = {"inputs_embeds": embeds, "labels": tokens(), "attention_mask": ones}
    assert error_of(simulated(model, batch, layout=Zigzag()), alone(model, batch)) <= BOUND


def test_layers_recomputed_in_the_backward_have_their_documents() -> None:
    """Also where another batch was seen since."""
    model = model_of("Gemma3")
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids, masks = tokens(), (MaskSpec(causal=True, cu_seqlens=DOCUMENTS), MaskSpec(causal=True))
    batch = {"input_ids": ids, "labels": ids}

    def rank(rank: int, collectives: SimulatedCollectives) -> Run:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(
            copy.deepcopy(model), mesh, layout=Zigzag(), collectives=collectives
        )
        parts = [shard_batch(batch, mesh, Zigzag(), mask=mask) for mask in masks]
        loss = sum(mine(**part).loss for part in parts)
        loss.backward()
        return loss.detach(), gradients_of(mine)

    found = summed(SimulatedWorld(2).run(rank))
    runs = [by_document(model, batch, DOCUMENTS), alone(model, batch)]
    assert error_of(found, summed(runs)) <= BOUND


def test_an_encoder_sees_the_whole_sequence() -> None:
    config = transformers.BertConfig(**SIZES, **EAGER, hidden_dropout_prob=0.0)
    model = transformers.BertModel(config, add_pooling_layer=False).double().eval()

    def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(model), mesh, collectives=collectives)
        found: Tensor = mine(**shard_batch({"input_ids": tokens()}, mesh)).last_hidden_state
        return found

    whole = torch.cat(SimulatedWorld(2).run(rank), 1)
    expected = model(tokens()).last_hidden_state
    torch.testing.assert_close(whole, expected, rtol=BOUND, atol=0)


def on_rank(rank: int, n: int, name: str, options: dict[str, Any]) -> Run:
    """Return loss and gradients summed over real ranks."""
    model, batch = model_of(name), {"input_ids": tokens(), "labels": tokens()}
    mesh = cp_mesh(n)
    context_parallel(model, mesh, **options)
    with exact():
        loss, grads = losses_and_gradients(model, shard_batch(batch, mesh, options["layout"]))
    for x in (loss, *grads.values()):
        torch.distributed.all_reduce(x)
    return loss, grads


@pytest.mark.parametrize(
    ("n", "name", "options"),
    [
        (2, "Mistral", {"layout": Zigzag()}),
        pytest.param(4, "Gemma3", {"layout": Greedy(2)}, marks=pytest.mark.long),
        pytest.param(4, "Llama", {"layout": Zigzag(), "ulysses_degree": 2}, marks=pytest.mark.long),
    ],
)
def test_processes_train_as_one_does(ranks: Any, n: int, name: str, options: Any) -> None:
    model, batch = model_of(name), {"input_ids": tokens(), "labels": tokens()}
    expected = alone(model, batch)
    for found in ranks(n).run(on_rank, n, name, options):
        assert error_of(found, expected) <= BOUND


def test_two_models_over_other_meshes_live_beside_each_other() -> None:
    model, batch = model_of("Llama"), {"input_ids": tokens(), "labels": tokens()}

    def rank(rank: int, collectives: SimulatedCollectives) -> list[Run]:
        whole = collectives.mesh((4,), ("cp",))
        half = collectives.mesh((2, 2), ("dp", "cp"))["cp"]
        models = [copy.deepcopy(model) for _ in range(3)]
        context_parallel(models[0], whole, layout=Zigzag(), collectives=collectives)
        context_parallel(models[1], half, collectives=collectives)
        return [
            losses_and_gradients(models[0], shard_batch(batch, whole, Zigzag())),
            losses_and_gradients(models[1], shard_batch(batch, half)),
            losses_and_gradients(models[2], batch),
        ]

    first, second, third = zip(*SimulatedWorld(4).run(rank), strict=True)
    expected = alone(model, batch)
    assert error_of(summed(first), expected) <= BOUND
    assert error_of(summed(second[:2]), expected) <= BOUND
    assert error_of(third[0], expected) == 0


# What is refused; one rank alone refuses before it would wait for another.


def one_rank() -> tuple[Any, SimulatedCollectives]:
    """Return the first of two ranks: a call that communicates fails, as the other one ended."""
    collectives = SimulatedCollectives(SimulatedWorld(2, timeout=0.1), 0)
    return collectives.mesh((2,), ("cp",)), collectives


def refused(name: str, message: str, call: dict[str, Any], **options: Any) -> None:
    """Expect that a model with these options refuses a call with these further arguments."""
    mesh, collectives = one_rank()
    model = context_parallel(model_of(name, **options), mesh, collectives=collectives)
    part = shard_batch({"input_ids": tokens(), "labels": tokens()}, mesh)
    with pytest.raises(InputError, match=message):
        model(**{**part, **call})


LOCAL = (SEQ_LEN + 1) // 2  # rows of the first of two ranks


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("output_attentions is not supported", {"output_attentions": True}),
        ("use_cache is not supported", {"use_cache": True}),
        ("past_key_values is not", {"past_key_values": transformers.DynamicCache()}),
        ("labels need shift_labels", {"shift_labels": None}),
        ("labels need shift_labels and num_items", {"num_items_in_batch": None}),
        ("attention_mask has zeros", {"attention_mask": (torch.arange(LOCAL) > 3)[None]}),
        ("dense mask", {"attention_mask": torch.zeros(1, 1, LOCAL, LOCAL)}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, LOCAL])}),
    ],
)
def test_a_call_that_ranks_cannot_serve_is_refused(message: str, call: dict[str, Any]) -> None:
    refused("Llama", message, call)


def test_what_a_models_config_asks_for_is_refused() -> None:
    refused("Llama", "attention dropout 0.1", {}, attention_dropout=0.1)
    refused("Llama", "output_attentions is not", {}, output_attentions=True)
    routed = "auxiliary loss .*; call parallelize_experts of hp-ep, .* before context_parallel"
    refused("Qwen3Moe", routed, {}, output_router_logits=True)
    refused("Qwen3Moe", routed, {"output_router_logits": True})
    refused("Gemma3", "function of its own", {}, use_bidirectional_attention=True)


def test_dropout_of_attention_is_that_of_one_rank() -> None:
    """And another one with another seed."""
    model = model_of("Qwen3", attention_dropout=0.5)
    batch = {"input_ids": tokens(), "labels": tokens()}

    def dropped(n: int, seed: int) -> Run:
        return simulated(model, batch, n, layout=Zigzag(), dropout_seed=seed)

    expected = dropped(1, 7)
    assert error_of(dropped(2, 7), expected) <= BOUND
    assert error_of(dropped(1, 8), expected) > 1e-3
    assert error_of(alone(model.eval(), batch), expected) > 1e-3


def test_layers_have_dropout_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mesh: Any, **options: Any) -> Tensor:
        seeds.append(options["dropout_seed"])
        return q

    monkeypatch.setattr(f"{context_parallel.__module__}.context_parallel_attention", attention)
    mesh: Any = SimulatedCollectives(SimulatedWorld(1), 0).mesh((1,), ("cp",))
    model = model_of("Llama", attention_dropout=0.1)
    context_parallel(model, mesh)
    for step in range(3):
        model(**shard_batch({"input_ids": tokens()}, mesh, dropout_seed=step))
    assert len(set(seeds)) == len(seeds) == 6


def test_dropout_of_attention_is_no_matter_outside_of_training() -> None:
    model = model_of("Llama", attention_dropout=0.1).eval()
    batch = {"input_ids": tokens(), "labels": tokens()}
    assert error_of(simulated(model, batch, layout=Zigzag()), alone(model, batch)) <= BOUND


def test_models_that_mix_rows_otherwise_are_refused() -> None:
    mesh, _ = one_rank()
    small = {"vocab_size": VOCAB, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1}
    encoder = transformers.T5ForConditionalGeneration(transformers.T5Config(**small))
    with pytest.raises(InputError, match="an encoder"):
        context_parallel(encoder, mesh)
    lfm = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    with pytest.raises(InputError, match="conv, convolutions"):
        context_parallel(transformers.Lfm2ForCausalLM(lfm), mesh)
    mamba = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(InputError, match="recurrent layers"):
        context_parallel(transformers.MambaForCausalLM(mamba), mesh)


def test_a_model_is_given_once_and_is_one_of_the_library() -> None:
    mesh, _ = one_rank()
    model = context_parallel(model_of("Llama"), mesh)
    with pytest.raises(InputError, match="given to context_parallel before"):
        context_parallel(model, mesh)
    with pytest.raises(InputError, match="must be a PreTrainedModel"):
        context_parallel(nn.Linear(2, 2), mesh)
    bloom = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=8, n_layer=1, n_head=2)
    with pytest.raises(InputError, match="no module of BloomForCausalLM takes its attention"):
        context_parallel(transformers.BloomForCausalLM(bloom), mesh)


def test_a_model_that_shares_the_config_is_refused_when_called() -> None:
    mesh, collectives = one_rank()
    model = model_of("Llama")
    other = type(model)(model.config)
    context_parallel(model, mesh, collectives=collectives)
    with pytest.raises(InputError, match="shares its config"):
        other(input_ids=tokens())


def test_both_functions_need_one_layout_and_one_length() -> None:
    mesh, collectives = one_rank()
    model = context_parallel(
        model_of("Llama"), mesh, layout=Zigzag(), seq_len=99, collectives=collectives
    )
    with pytest.raises(InputError, match="give both the same layout"):
        model(**shard_batch({"input_ids": tokens()}, mesh))
    with pytest.raises(InputError, match="given seq_len=99"):
        model(**shard_batch({"input_ids": tokens()}, mesh, Zigzag()))


def test_a_call_without_the_shard_is_refused_where_ranks_hold_parts() -> None:
    def rank(rank: int, collectives: SimulatedCollectives) -> None:
        mesh = collectives.mesh((2,), ("cp",))
        model = context_parallel(model_of("Llama"), mesh, collectives=collectives)
        with pytest.raises(InputError, match=r"without a sequence_shard.* Generation is not supp"):
            model.generate(tokens(), max_new_tokens=2, use_cache=False, do_sample=False)

    SimulatedWorld(2).run(rank)


def test_a_part_of_a_model_called_without_the_shard_is_refused_where_ranks_hold_parts() -> None:
    """Each rank would number its rows from 0."""
    mesh, collectives = one_rank()
    model = context_parallel(model_of("Llama"), mesh, collectives=collectives)
    for part, said in ((model.model, "without a sequence_shard"), (model, "without a sequence_sh")):
        with pytest.raises(InputError, match=said):
            part(tokens()[:, :LOCAL])
    whole = model_of("Llama")
    expected = whole.model(tokens()).last_hidden_state

    def rank(rank: int, collectives: SimulatedCollectives) -> Tensor:
        mesh = collectives.mesh((2,), ("cp",))
        mine = context_parallel(copy.deepcopy(whole), mesh, collectives=collectives)
        found: Tensor = mine.model(**shard_batch({"input_ids": tokens()}, mesh)).last_hidden_state
        return found

    found = torch.cat(SimulatedWorld(2).run(rank), 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_batch_is_cut_once() -> None:
    mesh, _ = one_rank()
    with pytest.raises(InputError, match="shard_batch cut it before; give the whole sequences"):
        shard_batch(shard_batch({"input_ids": tokens()}, mesh), mesh)


def test_a_model_that_keeps_arguments_from_its_attention_is_refused() -> None:
    mesh, collectives = one_rank()
    model = model_of("Llama")

    def without(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {key: x for key, x in kwargs.items() if key != "sequence_shard"}

    model.model.register_forward_pre_hook(without, with_kwargs=True)
    context_parallel(model, mesh, collectives=collectives)
    with pytest.raises(InputError, match="does not hand keyword arguments on"):
        model(**shard_batch({"input_ids": tokens()}, mesh))


def test_a_loss_that_is_not_the_share_of_a_mean_is_refused() -> None:
    mesh, collectives = one_rank()
    config = transformers.BertConfig(**SIZES)
    model = transformers.BertForMaskedLM(config).eval()
    context_parallel(model, mesh, collectives=collectives)
    with pytest.raises(InputError, match="BertForMaskedLM takes no shift_labels"):
        model(**shard_batch({"input_ids": tokens(), "labels": tokens()}, mesh))


def test_padding_that_an_encoder_would_see_is_refused() -> None:
    mesh, collectives = one_rank()
    model = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).eval()
    context_parallel(model, mesh, collectives=collectives)
    seen = (torch.arange(SEQ_LEN) < 20).expand(2, -1)
    with pytest.raises(InputError, match="is not causal and sees padding"):
        model(**shard_batch({"input_ids": tokens(), "attention_mask": seen}, mesh))


@pytest.mark.parametrize("seed", [-1, 1.0, True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    mesh, _ = one_rank()
    with pytest.raises(InputError, match="is no int of at least 0"):
        shard_batch({"input_ids": tokens()}, mesh, dropout_seed=seed)


@pytest.mark.parametrize(
    ("message", "batch"),
    [
        ("input_ids or inputs_embeds", {"labels": tokens()}),
        ("input_ids or", {"input_ids": tokens(), "inputs_embeds": torch.zeros(2, SEQ_LEN, 4)}),
        ("tensor of 2 dims", {"input_ids": tokens()[0]}),
        ("tensor of 2 dims", {"input_ids": tokens().tolist()}),
        ("labels must be", {"input_ids": tokens(), "labels": tokens()[:1]}),
        ("zeros before ones", {"input_ids": tokens(), "attention_mask": tokens() > 9}),
        ("pixel_values of shape", {"input_ids": tokens(), "pixel_values": torch.zeros(2, 3, 8, 8)}),
        ("at least one", {"input_ids": tokens()[:, :1]}),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(message: str, batch: dict[str, Any]) -> None:
    mesh, _ = one_rank()
    with pytest.raises(InputError, match=message):
        shard_batch(batch, mesh)


def test_padding_with_labels_is_refused() -> None:
    mesh, _ = one_rank()
    seen = (torch.arange(SEQ_LEN) < 20).expand(2, -1)
    with pytest.raises(InputError, match="padding has labels"):
        shard_batch({"input_ids": tokens(), "labels": tokens(), "attention_mask": seen}, mesh)


def test_what_is_none_in_a_batch_is_made_as_what_is_not_there() -> None:
    mesh, _ = one_rank()
    batch = {"input_ids": tokens(), "labels": tokens()}
    names = ("num_items_in_batch", "shift_labels", "position_ids", "attention_mask")
    part, plain = shard_batch({**batch, **dict.fromkeys(names)}, mesh), shard_batch(batch, mesh)
    assert part.keys() == plain.keys()
    tensors = [key for key, x in part.items() if isinstance(x, Tensor)]
    assert tensors == ["input_ids", "labels", "shift_labels", "num_items_in_batch", "position_ids"]
    assert all(torch.equal(part[key], plain[key]) for key in tensors)


def test_a_batch_keeps_what_is_no_sequence() -> None:
    mesh, _ = one_rank()
    count = torch.tensor(7)
    part = shard_batch(
        {"input_ids": tokens(), "labels": tokens(), "num_items_in_batch": count, "x": True}, mesh
    )
    assert part["num_items_in_batch"] is count
    assert part["x"] is True
    assert torch.equal(part["labels"], tokens()[:, :LOCAL])
    assert torch.equal(part["shift_labels"], tokens()[:, 1 : LOCAL + 1])
    assert torch.equal(part["position_ids"], torch.arange(LOCAL)[None])
