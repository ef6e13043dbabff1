"""Experts wherever a placement put them, saved and loaded: as they lie, or in their own order."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import cached
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
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
    model = ModuleDict({"first": build_moe(seed, experts=8), "second": build_moe(seed + 1)})
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
    straight = _build(placement if placement is COPIES else HOME, 0)
    _train(straight, range(2))
    if placement is not COPIES:
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
        state = _states(built)
        state_dict_loader.load(state, checkpoint_id=folder)
        with pytest.raises(ExpertConfigError) as error:
            _set(built, state)
        texts.append(str(error.value))
    with pytest.raises(CheckpointException, match="mismatch"):
        state_dict_loader.load(_states(_build(COPIES, 1)), checkpoint_id=folder)
    ordered = _ordered(home)
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
    assert results[0][:4] == [text] * 4
    assert results[0][4].startswith("first.experts._extra_state says that the rows are experts [7")


def test_weights_without_an_order_are_in_the_experts_own() -> None:
    old, new = build_moe(0), build_moe(1)
    foreign = {k: v for k, v in old.state_dict().items() if not k.endswith("_extra_state")}
    assert len(foreign) == len(old.state_dict()) - 1
    new.load_state_dict(foreign)
    assert torch.equal(new.experts.w1, old.experts.w1)
    assert sorted(foreign) == sorted(dict(old.named_parameters()))
    assert new.load_state_dict({}, strict=False).missing_keys == list(new.state_dict())


def _foreign(rank: int) -> list[str]:
    plain, away = _build(None, 0), _build(AWAY, 1)
    key = "first.experts._extra_state"
    foreign = {k: v for k, v in plain[0].state_dict().items() if k != key}
    _build(HOME, 2)[0].load_state_dict(foreign)
    with pytest.raises(ExpertConfigError) as error:
        away[0].load_state_dict(foreign)
    return [str(error.value)]


def test_weights_without_an_order_do_not_load_into_experts_that_moved(ranks: Any) -> None:
    for (text,) in ranks(4).run(_foreign):
        assert text.startswith("the saved weights are those of experts [0, 1, 2, 3, 4, 5, 6, 7], t")


CASES = [(COPIES, 1), (AWAY, 1), (PAIRS, 2)]
TARGETS = [(HOME, 1), (None, 1), (OTHERS, 1), (COPIES, 1), (PAIRS, 2), (None, 2)]


def _reordered(rank: int, folder: str, case: int, flat: bool) -> list[float]:
    straight = _build(CASES[case][0], 0, CASES[case][1])
    _train(straight, range(2))
    saved = _ordered(straight, flat=flat)
    state_dict_saver.save(saved, checkpoint_id=folder)
    before = _whole(saved)
    assert before[".model.first.experts.w1"].shape == (8, 6, 4)
    first = [slots[0] for slots in CASES[case][0].slots_of]
    slots = _whole(_states(straight, flat=flat))
    assert torch.equal(before[".model.first.experts.w1"], slots[".model.first.experts.w1"][first])
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
    for worst in ranks(4).run(_reordered, str(tmp_path), case, flat, timeout=120):
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
