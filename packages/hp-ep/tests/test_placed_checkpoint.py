"""Experts wherever a placement put them, saved and loaded: as they lie, or in their own order."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import ModuleDict

from hp_ep import (
    ExpertConfigError,
    ExpertParallel,
    MoE,
    Placement,
    migrate_experts,
    order_by_expert,
    order_by_slot,
    parallelize_experts,
)

from .reference import assert_close, build_moe

HOME = Placement.contiguous(8, 4)
AWAY = Placement(num_ranks=4, num_experts=8, experts=(7, 6, 5, 4, 3, 2, 1, 0))
COPIES = Placement(num_ranks=4, num_experts=8, experts=(7, 6, 0, 5, 4, 0, 3, 2, 0, 1, 0, 7))
OTHERS = Placement(num_ranks=4, num_experts=8, experts=(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3))
PAIRS = Placement(num_ranks=2, num_experts=8, experts=(7, 5, 3, 1, 0, 6, 4, 2, 0, 1))
Built = tuple[ModuleDict, torch.optim.Optimizer]


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("efsdp", "ep")
    return cached((shape, names), lambda: init_device_mesh("cpu", shape, mesh_dim_names=names))


def _build(placement: Placement | None, seed: int, efsdp: int = 1) -> Built:
    mesh = _mesh((efsdp, 4 // efsdp))
    model = ModuleDict(
        {"first": build_moe(seed, hidden=4, experts=8), "second": build_moe(seed + 1, hidden=4)}
    )
    style = ExpertParallel(placement=placement, token_axes=mesh)
    parallelize_experts(ModuleDict({"moe": model["first"]}), mesh["ep"], style)
    if efsdp > 1:
        first = model["first"].get_submodule("experts")
        unit = fully_shard(first, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(1))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)


def _first(model: ModuleDict) -> MoE:
    layer = model["first"]
    assert isinstance(layer, MoE)
    return layer


def _train(built: Built, steps: range) -> None:
    model, optimizer = built
    model.requires_grad_(True)
    _first(model).router.requires_grad_(False)  # its gradient is this rank's own part
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        (model["second"](_first(model)(x)) ** 2).sum().backward()
        optimizer.step()


def _states(built: Built, *, flat: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    optimizer = get_optimizer_state_dict(*built, options=options)
    return {"model": get_model_state_dict(built[0]), "optimizer": optimizer}


def _set(built: Built, state: dict[str, Any], *, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(built[0], state["model"])
    set_optimizer_state_dict(*built, state["optimizer"], options=options)


def _ordered(built: Built, *, flat: bool = False) -> dict[str, Any]:
    state = _states(built, flat=flat)
    return {name: order_by_expert(built[0], part) for name, part in state.items()}


def _whole(state: Any, path: str = "") -> dict[str, Tensor]:
    """Return all tensors of a nested state, whole, by path."""
    if isinstance(state, dict):
        parts = [_whole(value, f"{path}.{key}") for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    if isinstance(state, DTensor):
        return {path: state.full_tensor().clone()}
    return {path: state.clone()} if isinstance(state, Tensor) else {}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _resumed(rank: int, folder: str, placement: Placement) -> list[bool]:
    straight = _build(placement if placement == COPIES else HOME, 0)
    _train(straight, range(2))
    if placement != COPIES:
        migrate_experts(_first(straight[0]), placement, straight[1])
    saved = {**_states(straight)}
    state_dict_saver.save(saved, checkpoint_id=folder)
    before = _whole(saved)
    _train(straight, range(2, 4))
    resumed = _build(placement, 5)
    _train(resumed, range(7, 8))  # so that the optimizer has a state to load into
    state = _states(resumed)
    state_dict_loader.load(state, checkpoint_id=folder)
    _set(resumed, state)
    found = [_equal(_whole(_states(resumed)), before)]
    _train(resumed, range(2, 4))
    found.append(_equal(_whole(_states(resumed)), _whole(_states(straight))))
    found.append(not _equal(_whole(_states(resumed)), before))
    return found


@pytest.mark.parametrize("kind", ["home", "away", "copies"])
def test_training_goes_on_bitwise_under_the_placement_that_was_saved(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    placement = {"home": HOME, "away": AWAY, "copies": COPIES}[kind]
    assert ranks(4).run(_resumed, str(tmp_path), placement) == [[True] * 3] * 4


def _wrong(rank: int, folder: str) -> list[str]:
    away, home, plain = _build(AWAY, 0), _build(HOME, 1), _build(None, 1)
    state_dict_saver.save(_states(away), checkpoint_id=folder)
    buffer = io.BytesIO()
    torch.save({k: v for k, v in away[0].state_dict().items()}, buffer)
    buffer.seek(0)
    own = torch.load(buffer, weights_only=False)
    texts = []
    for built in (home, plain):
        before = _whole(built[0].state_dict())
        with pytest.raises(ExpertConfigError) as error:
            built[0].load_state_dict(own)
        texts.append(str(error.value))
        experts = {k: v for k, v in before.items() if "first.experts" in k}
        assert _equal({k: _whole(built[0].state_dict())[k] for k in experts}, experts)
        if built is plain:  # its state has no order for torch's loader to read
            continue
        state = _states(built)
        state_dict_loader.load(state, checkpoint_id=folder)
        with pytest.raises(ExpertConfigError) as error:
            _set(built, state)
        texts.append(str(error.value))
    with pytest.raises(CheckpointException, match="mismatch"):
        state_dict_loader.load(_states(_build(COPIES, 1)), checkpoint_id=folder)
    ordered = _ordered(home)
    ordered["model"]["first.experts._extra_state"] = torch.zeros(8, dtype=torch.int64)
    state_dict_loader.load(ordered, checkpoint_id=folder)
    with pytest.raises(ExpertConfigError) as error:
        order_by_slot(home[0], ordered["model"])
    return [*texts, str(error.value)]


def test_experts_in_another_order_are_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    results = ranks(4).run(_wrong, str(tmp_path))
    assert results == [results[0]] * 4
    text = (
        "the saved weights are those of experts [7, 6, 5, 4, 3, 2, 1, 0], this layer's of "
        "[0, 1, 2, 3, 4, 5, 6, 7]; load them under the placement they were saved with, or save "
        "what order_by_expert gives"
    )
    assert results[0][:3] == [text] * 3
    assert results[0][3].startswith("first.experts._extra_state says that the rows are experts [7")


def test_weights_without_an_order_are_in_the_experts_own() -> None:
    old, new = build_moe(0), build_moe(1)
    foreign = old.state_dict()
    new.load_state_dict(foreign)
    assert torch.equal(new.experts.gate_up_proj, old.experts.gate_up_proj)
    assert sorted(foreign) == sorted(dict(old.named_parameters()))
    assert new.load_state_dict({}, strict=False).missing_keys == list(new.state_dict())


CASES = [(COPIES, 1), (AWAY, 1), (PAIRS, 2)]
TARGETS = [(HOME, 1), (None, 1), (OTHERS, 1), (COPIES, 1), (PAIRS, 2), (None, 2)]


def _reordered(rank: int, folder: str, case: int, flat: bool) -> list[float]:
    straight = _build(CASES[case][0], 0, CASES[case][1])
    _train(straight, range(2))
    saved = _ordered(straight, flat=flat)
    state_dict_saver.save(saved, checkpoint_id=folder)
    before = _whole(saved)
    assert before[".model.first.experts.gate_up_proj"].shape == (8, 2, 4, 4)
    first = [slots[0] for slots in CASES[case][0].slots_of]
    slots = _whole(_states(straight, flat=flat))
    assert torch.equal(
        before[".model.first.experts.gate_up_proj"],
        slots[".model.first.experts.gate_up_proj"][first],
    )
    _train(straight, range(2, 3))
    after, worst = _whole(_ordered(straight, flat=flat)), []
    for placement, efsdp in TARGETS:
        other = _build(placement, 5, efsdp)
        _train(other, range(7, 8))
        state = _ordered(other, flat=flat)
        state_dict_loader.load(state, checkpoint_id=folder)
        _set(other, {k: order_by_slot(other[0], v) for k, v in state.items()}, flat=flat)
        assert _equal(_whole(_ordered(other, flat=flat)), before)
        if efsdp == CASES[case][1]:  # as many ranks with tokens of their own
            _train(other, range(2, 3))
            got = _whole(_ordered(other, flat=flat))
            worst += [float((got[k] - after[k]).abs().max()) for k in after]
    return worst


@pytest.mark.parametrize(("case", "flat"), [(0, False), (0, True), (1, False), (2, True)])
def test_what_is_saved_by_expert_loads_under_every_split_and_placement(
    ranks: Any, tmp_path: Path, case: int, flat: bool
) -> None:
    for worst in ranks(4).run(_reordered, str(tmp_path), case, flat):
        assert len(worst) > 20
        assert_close(torch.tensor(worst), torch.zeros(len(worst)), 1e-9)


def _no_order(rank: int) -> str:
    layer = build_moe(0, experts=3)
    three = Placement(num_ranks=2, num_experts=3, experts=(0, 1, 2, 0))
    mesh = cached(("flat", 2), lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    ExpertParallel(placement=three).apply(layer, mesh)
    with pytest.raises(ExpertConfigError) as error:
        order_by_expert(layer, layer.state_dict())
    return str(error.value)


def test_experts_that_only_replicas_spread_evenly_have_no_order(ranks: Any) -> None:
    for text in ranks(2).run(_no_order):
        assert text.startswith(
            "experts: 2 ranks do not divide 3 experts, so they have no order without"
        )


def _by_expert(layer: MoE, placement: Placement | None) -> dict[str, Tensor]:
    """Return the weights, whole, in the experts' own order."""
    whole = _whole(dict(layer.experts.named_parameters()))
    first = range(8) if placement is None else [slots[0] for slots in placement.slots_of]
    return {name: weight[list(first)] for name, weight in whole.items()}


def _others(seed: int) -> dict[str, Tensor]:
    """Return the weights of one process, as others save them."""
    return {
        f"first.{k}": v.detach() for k, v in build_moe(seed, hidden=4, experts=8).named_parameters()
    }


def _as_before(built: Built, placement: Placement | None, seed: int) -> bool:
    expected = build_moe(seed, hidden=4, experts=8)
    mine = _by_expert(_first(built[0]), placement)
    theirs = {f".{k}": v.detach() for k, v in expected.experts.named_parameters()}
    return _equal(mine, theirs) and torch.equal(
        _first(built[0]).router.weight, expected.router.weight
    )


EVERY = [None, HOME, AWAY, COPIES]


def _keys(rank: int) -> list[list[str]]:
    built = [_build(placement, 0)[0] for placement in (None, AWAY)]
    return [
        sorted(set(state) - set(dict(model.named_parameters())))
        for model in built
        for state in (model.state_dict(), get_model_state_dict(model))
    ]


def test_only_a_layer_with_a_placement_saves_an_order(ranks: Any) -> None:
    key = ["first.experts._extra_state"]
    assert ranks(4).run(_keys) == [[[], [], key, key]] * 4
    layer = build_moe(0)
    assert list(layer.state_dict()) == [name for name, _ in layer.named_parameters()]


def _loads(rank: int, how: str) -> list[bool]:
    found = []
    for placement in EVERY[:3] if how == "full" else EVERY:  # torch cuts by the rows that are here
        built = _build(placement, 5)
        model = built[0]
        state = {k: v for k, v in model.state_dict().items() if "first.experts" not in k}
        others: dict[str, Any] = {**state, **_others(3)}
        if how == "split":  # as another split of experts without a placement has it
            plain = _build(None, 3)[0]
            others |= {k: v for k, v in plain.state_dict().items() if "_extra" not in k}
        if how == "full":
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, others, options=options)
        elif how == "split":
            model.load_state_dict(others)
        else:
            set_model_state_dict(model, {**others, **_build(None, 3)[0].state_dict()})
        found.append(_as_before(built, placement, 3))
    return found


@pytest.mark.parametrize("how", ["split", "set", "full"])
def test_weights_without_an_order_go_where_the_placement_wants_them(ranks: Any, how: str) -> None:
    number = 3 if how == "full" else 4
    assert ranks(4).run(_loads, how) == [[True] * number] * 4


def _read(rank: int, folder: str) -> list[bool]:
    found = []
    for placement in EVERY:
        built = _build(placement, 5)
        model = built[0]
        state = order_by_expert(model, get_model_state_dict(model))
        state_dict_loader.load(state, checkpoint_id=folder)
        set_model_state_dict(model, order_by_slot(model, state))
        found.append(_as_before(built, placement, 3))
    built = _build(None, 5)
    state = get_model_state_dict(built[0])
    state_dict_loader.load(state, checkpoint_id=folder)
    set_model_state_dict(built[0], state)
    found.append(_as_before(built, None, 3))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_that_others_wrote_loads_by_torchs_loader(ranks: Any, tmp_path: Path) -> None:
    model = ModuleDict(
        {"first": build_moe(3, hidden=4, experts=8), "second": build_moe(4, hidden=4)}
    )
    others = {k: v.detach() for k, v in model.named_parameters()}
    state_dict_saver.save(others, checkpoint_id=tmp_path, no_dist=True)
    assert ranks(4).run(_read, str(tmp_path)) == [[True] * 5] * 4


def _written(rank: int, folder: str) -> None:
    for index, placement in enumerate(EVERY):
        model = _build(placement, 3)[0]
        state = order_by_expert(model, get_model_state_dict(model))
        state_dict_saver.save(state, checkpoint_id=f"{folder}/{index}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_saved_by_expert_is_what_others_save(ranks: Any, tmp_path: Path) -> None:
    expected = ModuleDict(
        {"first": build_moe(3, hidden=4, experts=8), "second": build_moe(4, hidden=4)}
    )
    ranks(4).run(_written, str(tmp_path))
    for index in range(len(EVERY)):
        reader = FileSystemReader(tmp_path / str(index))
        assert sorted(reader.read_metadata().state_dict_metadata) == sorted(
            dict(expected.named_parameters())
        )
        state = {k: torch.zeros_like(v) for k, v in expected.named_parameters()}
        state_dict_loader.load(state, checkpoint_id=tmp_path / str(index), no_dist=True)
        assert _equal(_whole(state), _whole(dict(expected.named_parameters())))


def test_weights_without_an_order_load_into_a_compiled_layer() -> None:
    old, new = build_moe(0), build_moe(1)
    compiled: Any = torch.compile(new, backend="eager")
    set_model_state_dict(compiled, {k: v.detach() for k, v in old.named_parameters()})
    assert torch.equal(new.experts.gate_up_proj, old.experts.gate_up_proj)
    assert sorted(get_model_state_dict(compiled)) == sorted(dict(old.named_parameters()))


def test_an_order_that_was_saved_still_loads_and_a_wrong_one_is_still_refused() -> None:
    old, new = build_moe(0), build_moe(1)
    state = {k: v.detach() for k, v in old.named_parameters()}
    state["experts._extra_state"] = torch.arange(4)
    new.load_state_dict(state)
    assert torch.equal(new.experts.gate_up_proj, old.experts.gate_up_proj)
    assert "experts._extra_state" in state
    state["experts._extra_state"] = torch.tensor([1, 0, 2, 3])
    before = build_moe(1)
    with pytest.raises(ExpertConfigError, match=r"those of experts \[1, 0, 2, 3\], this layer's"):
        before.load_state_dict(state)
    assert torch.equal(before.experts.gate_up_proj, build_moe(1).experts.gate_up_proj)


def _in_parts(rank: int) -> list[bool]:
    found = []
    for placement in EVERY:
        whole, model = _build(placement, 3)[0].state_dict(), _build(placement, 5)[0]
        plain = {k: v for k, v in _build(None, 3)[0].state_dict().items() if "_extra" not in k}
        for name in plain:
            model.load_state_dict({name: plain[name]}, strict=False)
        after = model.state_dict()
        weights = [key for key in whole if "_extra" not in key]
        same = [torch.equal(_local(after[key]), _local(whole[key])) for key in weights]
        found.append(all(same))
    return found


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def test_each_weight_alone_goes_where_the_placement_wants_it(ranks: Any) -> None:
    assert ranks(4).run(_in_parts) == [[True] * len(EVERY)] * 4


def _over_another_axis(rank: int) -> list[str]:
    mesh = _mesh((2, 2))
    layer = build_moe(3, hidden=4, experts=8)
    before = [p.detach().clone() for p in layer.experts.parameters()]
    placement = Placement(num_ranks=2, num_experts=8, experts=(7, 6, 5, 4, 3, 2, 1, 0))
    ExpertParallel(placement=placement).apply(layer, mesh["ep"])
    fully_shard(layer.experts, mesh=mesh["efsdp"], shard_placement_fn=lambda _: Shard(2))
    names = [f"experts.{name}" for name, _ in layer.experts.named_parameters()]
    cuts = [Shard(0), Replicate()]
    distribute: Any = distribute_tensor
    state: dict[str, Any] = {
        n: distribute(w, mesh, cuts) for n, w in zip(names, before, strict=True)
    }
    calls: list[Callable[[], object]] = [
        lambda: layer.load_state_dict(state, strict=False),
        lambda: order_by_slot(layer, state),
    ]
    texts = []
    for call in calls:
        with pytest.raises(ExpertConfigError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_rows_that_another_axis_cuts_are_refused(ranks: Any) -> None:
    for texts in ranks(4).run(_over_another_axis):
        for text in texts:
            assert re.search(r"so only ep of \('efsdp', 'ep'\) may cut dimension 0", text), text


def _scalar(rank: int) -> list[bool]:
    model, _ = _build(AWAY, 0)
    step = distribute_tensor(torch.tensor(3.0), _mesh((1, 4)), [Replicate(), Replicate()])
    state = {"state": {"first.experts.down_proj": {"step": step}}}
    found = order_by_expert(model, state), order_by_slot(model, state)
    return [each == state for each in found]


def test_numbers_without_rows_are_left_as_they_are(ranks: Any) -> None:
    assert ranks(4).run(_scalar) == [[True] * 2] * 4
