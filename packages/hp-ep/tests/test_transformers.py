"""Models of Hugging Face transformers whose experts are spread equal the models in one process."""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_pool import cached
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hp_dtensor import RecordingCollectives
from hp_ep import AllToAll, Dedup
from hp_ep.transformers import parallelize_experts

from .hf_models import (
    BOUND,
    MODELS,
    batch_of,
    error_of,
    exact,
    model_of,
    padded,
    rows_of,
    step,
)

transformers = pytest.importorskip("transformers")

SPLITS = {2: [3, 1], 4: [1, 2, 1, 1]}  # sequences of each rank
DISPATCHERS: dict[str, Any] = {"all_to_all": AllToAll, "dedup": Dedup}


@pytest.fixture(autouse=True)
def exact_models() -> Iterator[None]:
    with exact():
        yield


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] = ("ep",)) -> DeviceMesh:
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _batch(size: int, masked: bool = False) -> dict[str, Tensor]:
    batch = batch_of(sum(SPLITS[size]))
    return padded(batch) if masked else batch


def _experts(model: nn.Module) -> dict[str, Any]:
    found = {name: m for name, m in model.named_modules() if name.endswith("mlp.experts")}
    assert found
    return found


def _spread(model: Any, size: int, dispatcher: str = "auto", **options: Any) -> Any:
    mesh, (first, *_) = _mesh((size,)), _experts(model).values()
    make = DISPATCHERS.get(dispatcher)
    given: Any = "auto" if make is None else make(mesh, first.num_experts)
    names = parallelize_experts(model, mesh, given, **{"token_axes": mesh, **options})
    assert names == list(_experts(model))
    return model


def _summed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return sums over ranks of losses and gradients; those of experts are sums already."""
    for name, value in found.items():
        if not name.rpartition(".")[0].endswith("experts"):
            torch.distributed.all_reduce(value)
    return found


def _on_rank(
    rank: int, size: int, name: str, dispatcher: str, masked: bool, recompute: bool
) -> dict[str, Tensor]:
    model = _spread(model_of(name), size, dispatcher)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with exact():
        return _summed(step(model, rows_of(_batch(size, masked), SPLITS[size], rank)))


def _check(
    ranks: Any,
    size: int,
    name: str,
    dispatcher: str,
    *,
    masked: bool = False,
    recompute: bool = False,
) -> None:
    expected = step(model_of(name), _batch(size, masked))
    assert ("aux_loss" in expected) == ("output_router_logits" in MODELS[name])
    for found in ranks(size).run(_on_rank, size, name, dispatcher, masked, recompute):
        assert error_of(found, expected) <= BOUND


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    [
        ("Qwen3Moe", "auto"),
        ("Mixtral", "all_to_all"),
        ("DeepseekV3", "dedup"),
        ("GptOss", "all_to_all"),
        ("Olmoe", "dedup"),
        ("Qwen2Moe", "all_to_all"),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Any, name: str, dispatcher: str
) -> None:
    _check(ranks, 2, name, dispatcher)


def test_a_model_may_choose_an_expert_twice_for_a_token(ranks: Any) -> None:
    """As in DeepSeek-V4 made of a config: the tables of its hash layers are zero then."""
    _check(ranks, 2, "DeepseekV4", "all_to_all")


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dispatcher"), [("GptOss", "dedup"), ("DeepseekV3", "all_to_all")]
)
def test_four_ranks_have_what_one_process_has(ranks: Any, name: str, dispatcher: str) -> None:
    _check(ranks, 4, name, dispatcher, masked=True)


def _accumulated(rank: int) -> dict[str, Tensor]:
    model, batch = _spread(model_of("Mixtral"), 2), batch_of(8)
    model.router_aux_loss_coef /= 2
    labels = int((batch["labels"][:, 1:] != -100).sum())
    for half in (0, 2):
        part = rows_of(batch, [3, 1, 2, 2], half + rank)
        with exact():
            model(**part, num_items_in_batch=labels).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return _summed(whole)


def test_an_auxiliary_loss_over_two_micro_batches_is_the_sum_of_theirs(ranks: Any) -> None:
    """Half the coefficient makes that their mean, which is near the whole batch's."""
    model, batch = model_of("Mixtral"), batch_of(8)
    labels = int((batch["labels"][:, 1:] != -100).sum())
    model.router_aux_loss_coef /= 2
    aux = 0.0
    for half in (0, 1):
        output = model(**rows_of(batch, [4, 4], half), num_items_in_batch=labels)
        output.loss.backward()
        aux += output.aux_loss.item() / 2
    expected = {name: p.grad for name, p in model.named_parameters()}
    whole = model_of("Mixtral")(**batch).aux_loss.item()
    assert aux != whole
    assert aux == pytest.approx(whole, rel=0.01)
    for found in ranks(2).run(_accumulated):
        assert error_of(found, expected) <= BOUND


def test_padding_counts_in_no_loss(ranks: Any) -> None:
    _check(ranks, 2, "Olmoe", "all_to_all", masked=True)


def test_layers_may_be_recomputed_in_the_backward(ranks: Any) -> None:
    _check(ranks, 2, "Mixtral", "dedup", recompute=True)


def _losses(rank: int) -> list[float]:
    """Return losses with labels or also their number, without token axes and with; and calls."""
    mesh, part = _mesh((2,)), rows_of(_batch(2), SPLITS[2], rank)
    found, counted = [], RecordingCollectives()
    given: dict[str, Any]
    for given in ({"token_axes": None}, {"token_axes": mesh, "collectives": counted}):
        model = _spread(model_of("Mixtral", output_router_logits=False), 2, **given)
        with exact():
            found += [model(**part, num_items_in_batch=n).loss.item() for n in (None, 10)]
    calls = counted.by_call
    return [*found, calls["ep", "all_reduce"].calls, calls["ep", "all_to_all"].calls]


def test_a_loss_is_a_share_where_token_axes_are_told_and_labels_are_not_counted(ranks: Any) -> None:
    model, count = model_of("Mixtral", output_router_logits=False), []
    for rank, (own, divided, share, given, reduced, exchanged) in enumerate(ranks(2).run(_losses)):
        part = rows_of(_batch(2), SPLITS[2], rank)
        labels = int((part["labels"][:, 1:] != -100).sum())
        expected = model(**part).loss.item()
        assert own == pytest.approx(expected, rel=BOUND)
        assert divided == given == pytest.approx(expected * labels / 10, rel=BOUND)
        count.append((share, expected * labels, labels))
        assert reduced == 1  # in the forward where labels were to be counted
        assert exchanged >= 2 * 2 * 3  # forwards, layers, counts and there and back
    total = sum(labels for *_, labels in count)
    for share, summed, _ in count:
        assert share == pytest.approx(summed / total, rel=BOUND)


KEYWORDS: dict[str, dict[str, Any]] = {
    "labels": {"labels": None},
    "num_items_in_batch": {"num_items_in_batch": 10},
    "output_router_logits": {"output_router_logits": True},
}
"""What the second rank calls a model with that is called with labels alone."""


def _unlike(rank: int, dispatcher: str) -> list[Any]:
    model = _spread(model_of("Mixtral", output_router_logits=False), 2, dispatcher)
    part, found = rows_of(_batch(2), SPLITS[2], rank), []
    for other in KEYWORDS.values():
        given = {**part, **(other if rank else {})}
        found.append(_text(partial(model, **given)))
        with torch.no_grad():  # what follows such a call is compared anew
            found.append(model.model(part["input_ids"]).last_hidden_state.isfinite().all().item())
    model(**part).loss.backward()
    return found


@pytest.mark.parametrize("dispatcher", ["all_to_all", "dedup"])
def test_keywords_on_one_rank_alone_raise_on_all(ranks: Any, dispatcher: str) -> None:
    first, second = ranks(2).run(_unlike, dispatcher)
    assert first == second
    texts = ["none of them", "labels and num_items_in_batch", "labels and output_router_logits"]
    for found, text in zip(first[::2], texts, strict=True):
        assert re.match("RoutingError: all ranks must give their model the same of labels, ", found)
        assert found.endswith(f"got rank 0: labels; rank 1: {text}")
    assert first[1::2] == [True] * len(KEYWORDS)


def _states(rank: int, name: str, folder: Path) -> list[Any]:
    model = model_of(name)
    next(iter(_experts(model).values())).down_proj.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    _spread(model, 2)
    state = model.state_dict()
    for key, value in state.items():
        spread = ".mlp.experts." in key
        assert isinstance(value, DTensor) == spread
        assert not spread or value.to_local().shape[0] == before[key].shape[0] // 2
    whole = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=whole)
    if rank == 0:
        model.save_pretrained(folder, state_dict=dict(saved))
    other = _spread(model_of(name), 2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    set_model_state_dict(other, dict(before), options=whole)  # it changes what it is given
    loaded = get_model_state_dict(other, options=whole)
    frozen = [p.requires_grad for p in model.parameters()].count(False)
    return [before, {k: v.shape for k, v in state.items()}, saved, loaded, frozen]


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV3"])
def test_state_dicts_are_those_of_the_library_in_both_directions(
    ranks: Any, name: str, tmp_path: Path
) -> None:
    expected = model_of(name).state_dict()
    for before, shapes, saved, loaded, frozen in ranks(2).run(_states, name, tmp_path):
        assert list(shapes) == list(expected)
        assert shapes == {key: value.shape for key, value in expected.items()}
        read = type(model_of(name)).from_pretrained(tmp_path, dtype=torch.float64).state_dict()
        for state in (before, saved, loaded, read):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], value) for key, value in expected.items())
        assert frozen == 1


def _saved(rank: int, folder: Path) -> list[str]:
    """Write the library's files of a model and of its copy; return the errors of wrong calls."""
    model = _spread(model_of("Mixtral"), 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, each in (("model", model), ("copy", copy.deepcopy(model))):
        whole = get_model_state_dict(each, options=options)
        if rank == 0:
            each.save_pretrained(folder / name, state_dict=whole)
        dist.barrier()
    wrong = folder / "wrong"
    return [
        _text(lambda: model.save_pretrained(wrong)),
        _text(lambda: model.save_pretrained(wrong, rank == 0)),
        _text(lambda: model.save_pretrained(wrong, state_dict=model.state_dict())),
        _text(lambda: copy.deepcopy(model).save_pretrained(wrong)),
        f"{wrong.exists()}",
    ]


def test_files_are_written_of_whole_tensors_and_of_no_parts(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(_saved, tmp_path)
    assert first == second
    for text in first[:-1]:
        assert re.match("ExpertConfigError: save_pretrained got no state_dict of whole tens", text)
    assert first[-1] == "False"
    expected = model_of("Mixtral").state_dict()
    for name in ("model", "copy"):
        read = transformers.MixtralForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        assert read.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in read.state_dict().items())


def _generated(rank: int) -> list[Tensor]:
    model = _spread(model_of("GptOss"), 2).eval()
    ids, found = batch_of(2)["input_ids"], []
    for cache in (False, True):
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": cache}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    with torch.no_grad(), exact():
        found.append(model(ids).logits)
    return found


def test_ranks_generate_together_what_one_process_does(ranks: Any) -> None:
    model, ids = model_of("GptOss", output_router_logits=False).eval(), batch_of(2)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    logits = model(ids).logits
    for plain, cached_too, seen in ranks(2).run(_generated):
        assert torch.equal(plain, expected)
        assert torch.equal(cached_too, expected)
        torch.testing.assert_close(seen, logits, rtol=0, atol=BOUND)


def _copied(rank: int) -> list[dict[str, Tensor]]:
    model = _spread(model_of("Mixtral"), 2)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with exact():
        return [_summed(step(other, rows_of(_batch(2), SPLITS[2], rank)))]


def test_a_copy_computes_with_its_own_weights(ranks: Any) -> None:
    expected = step(model_of("Mixtral"), _batch(2))
    for (found,) in ranks(2).run(_copied):
        assert error_of(found, expected) <= BOUND


def _at_home(rank: int) -> dict[str, Tensor]:
    """Each rank has all experts, and both hold different tokens."""
    mesh, model = _mesh((2, 1), ("dp", "ep")), model_of("GptOss")
    parallelize_experts(model, mesh["ep"], token_axes=mesh["dp"])
    with exact():
        found = step(model, rows_of(_batch(2), SPLITS[2], rank))
    for value in found.values():
        torch.distributed.all_reduce(value)
    return found


def test_one_rank_of_experts_computes_at_home(ranks: Any) -> None:
    expected = step(model_of("GptOss"), _batch(2))
    for found in ranks(2).run(_at_home):
        assert error_of(found, expected) <= BOUND


def _narrow(rank: int) -> list[Tensor]:
    model = _spread(model_of("Mixtral").to(torch.bfloat16), 2)
    output = model(**rows_of(_batch(2), SPLITS[2], rank))
    output.loss.backward()
    grad = model.model.layers[0].mlp.experts.gate_up_proj.grad
    loss = output.loss.detach()
    torch.distributed.all_reduce(loss)
    return [loss, grad.full_tensor()]


def test_bfloat16_with_routing_weights_in_float32_is_as_near_as_the_library(ranks: Any) -> None:
    """The router of Mixtral gives float32 in every model."""
    model = model_of("Mixtral").to(torch.bfloat16)
    loss = model(**_batch(2)).loss
    loss.backward()
    grad = model.model.layers[0].mlp.experts.gate_up_proj.grad
    for found, spread in ranks(2).run(_narrow):
        assert found.item() == pytest.approx(loss.item(), rel=1e-2)
        assert spread.dtype == torch.bfloat16
        assert float((spread - grad).norm() / grad.norm()) < 0.05


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _changed(name: str, change: Callable[[Any], object], **options: Any) -> Any:
    model = model_of(name, **options)
    change(model)
    return model


def _narrow_weights(model: Any) -> None:
    _experts(model)["model.layers.1.mlp.experts"].to(torch.float8_e4m3fn)


def _tie(model: Any) -> None:
    first, second = _experts(model).values()
    second.down_proj = first.down_proj


def _mark(model: Any) -> None:
    _experts(model)["model.layers.0.mlp.experts"]._is_expert_parallel = True


def _add_parameter(model: Any) -> None:
    _experts(model)["model.layers.0.mlp.experts"].act_fn = nn.PReLU()


def _without_top_k(model: Any) -> None:
    _experts(model)["model.layers.0.mlp.experts"].config = SimpleNamespace()


def _refusals(rank: int) -> list[str]:
    mesh, wide = _mesh((2,)), _mesh((2, 1), ("dp", "ep"))
    uneven = dict(num_experts=7, num_experts_per_tok=1)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    twice, spread = _spread(model_of("Qwen3Moe"), 2), _spread(model_of("GptOss"), 2)
    outer, inner = model_of("Qwen3Moe"), model_of("Qwen3Moe").model
    parallelize_experts(outer.model, mesh)
    calls: list[Callable[[], object]] = [
        lambda: parallelize_experts(llama, mesh),
        lambda: parallelize_experts(nn.Linear(2, 2), mesh),
        lambda: parallelize_experts(twice, mesh),
        lambda: parallelize_experts(model_of("Qwen3Moe", **uneven), mesh),
        lambda: parallelize_experts(model_of("Qwen3Moe"), wide),
        lambda: parallelize_experts(model_of("Qwen3Moe"), mesh, "dedup"),  # type: ignore[arg-type]
        lambda: parallelize_experts(model_of("Qwen3Moe"), mesh, AllToAll(mesh, 4)),
        lambda: parallelize_experts(model_of("Qwen3Moe"), mesh, token_axes=()),
        lambda: parallelize_experts(
            _changed("Mixtral", lambda m: setattr(m, "is_quantized", True)), mesh
        ),
        lambda: parallelize_experts(_changed("Mixtral", _narrow_weights), mesh),
        lambda: parallelize_experts(_changed("Mixtral", _tie), mesh),
        lambda: parallelize_experts(_changed("Mixtral", _mark), mesh),
        lambda: parallelize_experts(_changed("Mixtral", _add_parameter), mesh),
        lambda: parallelize_experts(_changed("Mixtral", _without_top_k), mesh),
        lambda: parallelize_experts(inner, mesh, token_axes=mesh),
        lambda: parallelize_experts(inner, mesh, token_axes=()),
        lambda: parallelize_experts(inner, mesh, AllToAll),  # type: ignore[arg-type]
        # Calls:
        lambda: type(spread)(spread.config)(**_batch(2)),
        lambda: _spread(model_of("Mixtral"), 2, token_axes=None)(**_batch(2)),
        lambda: spread(**_batch(2), return_dict=False),
        lambda: outer(**_batch(2)),
        lambda: outer(**{**_batch(2), "labels": None}),
        lambda: outer.model(_batch(2)["input_ids"], output_router_logits=True),
    ]
    return [_text(call) for call in calls]


REFUSALS = [
    r"LlamaForCausalLM has no experts .* @use_experts_implementation, .* none are named experts",
    r"must be a PreTrainedModel of transformers, got a Linear",
    r"this Qwen3MoeForCausalLM was given to parallelize_experts before",
    r"layers.0.mlp.experts: ep=2 does not divide num_experts=7; use one of \[1, 7\] ranks",
    r"a mesh with axes \('dp', 'ep'\); pass the 1-D mesh",
    r"dispatcher='dedup' is not 'auto' or a TokenDispatcher",
    r"AllToAll for 4 experts in a layer that has 8",
    r"token_axes \[\] do not split tokens between all ranks \[0, 1\] of ep=2",
    r"this MixtralForCausalLM is quantized",
    r"layers.1.mlp.experts: gate_up_proj is a Tensor of torch.float8_e4m3fn",
    r"'model.layers.0.mlp.experts.down_proj', .* are one parameter",
    r"layers.0.mlp.experts: transformers itself has spread these experts",
    r"layers.0.mlp.experts: .* parameters \['gate_up_proj', 'down_proj', 'act_fn.weight'\]",
    r"SimpleNamespace has no num_experts_per_tok",
    *2 * [r"token_axes are for the losses of a model, and the forward of Qwen3MoeModel makes none"],
    r"dispatcher is the class AllToAll; give an object of it",
    r"this GptOssExperts belongs to no model given to parallelize_experts, but shares its config",
    r"auxiliary loss of all tokens; say which axes split them",
    r"output_router_logits=True with return_dict=False is not supported",
    *3 * [r"output_router_logits=True asks a Qwen3MoeModel for what an auxiliary loss is made of"],
]


def test_what_cannot_be_spread_is_refused_on_all_ranks_before_any_communication(ranks: Any) -> None:
    first, second = ranks(2).run(_refusals)
    assert first == second
    for text, expected in zip(first, REFUSALS, strict=True):
        assert re.match(f"ExpertConfigError: .*{expected}", text), text


def _without_labels(rank: int) -> dict[str, Tensor]:
    model, part = _spread(model_of("Mixtral"), 2), rows_of(_batch(2), SPLITS[2], rank)
    with exact():
        return _summed(step(model, {**part, "labels": torch.full_like(part["labels"], -100)}))


def test_without_any_label_the_auxiliary_loss_is_left(ranks: Any) -> None:
    model, batch = model_of("Mixtral"), _batch(2)
    assert model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).loss.isnan()
    aux = model(batch["input_ids"]).aux_loss
    (model.router_aux_loss_coef * aux).backward()
    for found in ranks(2).run(_without_labels):
        assert found["aux_loss"].item() == pytest.approx(aux.item(), rel=BOUND)
        assert found["loss"].item() == pytest.approx(0.3 * aux.item(), rel=BOUND)
        for name, p in model.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(found[name], grad, rtol=BOUND, atol=BOUND)


def _headless(rank: int) -> list[str]:
    """Return what models say whose losses are not those of the library's language models."""
    mesh, part = _mesh((2,)), rows_of(_batch(2), SPLITS[2], rank)
    options = dict(MODELS["Mixtral"], vocab_size=8, hidden_size=8, intermediate_size=8)
    config = transformers.MixtralConfig(**options, num_attention_heads=1, num_hidden_layers=1)
    config.pad_token_id = 0
    model = transformers.MixtralForSequenceClassification(config)
    parallelize_experts(model, mesh, token_axes=mesh)
    changed = model_of("Mixtral")
    forward = inspect.unwrap(type(changed).forward)
    with patch.dict(forward.__globals__, load_balancing_loss_func=lambda *_: 0):
        parallelize_experts(changed, mesh, token_axes=mesh)
    ids = part["input_ids"] % 8
    labels = torch.zeros(ids.shape[0], dtype=torch.long)
    wrapped = _spread(model_of("Mixtral"), 2)
    wrapped.model.__class__ = type("Wrapped", (type(wrapped.model),), {})  # as FSDP does
    whole = torch.zeros(1, 1, 11, 11, dtype=torch.float64)
    dense = _spread(model_of("Mixtral"), 2)
    calls = (
        lambda: model(ids, labels=labels),
        lambda: changed(**part),
        lambda: wrapped(**part),
        lambda: dense(**part, attention_mask=whole),
    )
    return [_text(call) for call in calls]


def test_losses_that_are_no_shares_are_refused(ranks: Any) -> None:
    for labels, balance, logits, mask in ranks(2).run(_headless):
        assert re.match("ExpertConfigError: the loss of MixtralForSequenceClass.* takes no", labels)
        assert re.match("ExpertConfigError: the auxiliary loss of MixtralForC.* is not", balance)
        assert re.match("ExpertConfigError: MixtralForCausalLM returned no router logits", logits)
        assert re.match(r"ExpertConfigError: attention_mask \(1, 1, 11, 11\) for", mask), mask


@pytest.mark.parametrize(
    ("library", "found"),
    [(None, "it is not installed"), (SimpleNamespace(__version__="5.22.0.dev0"), "this is 5.22.0")],
)
def test_a_missing_or_an_old_library_is_told(
    monkeypatch: pytest.MonkeyPatch, library: Any, found: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", library)
    with pytest.raises(ImportError, match=rf"{found}.*; pip install 'transformers>=5.23'"):
        parallelize_experts(nn.Linear(2, 2), mesh=None)  # type: ignore[arg-type]
