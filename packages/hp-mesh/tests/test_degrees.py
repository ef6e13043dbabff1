"""Degrees: values, inference, and the errors that name the legal ones."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError

from .strategies import BASE, axes_of, fields, world_of


@given(fields(), st.data())
@settings(deadline=None, max_examples=200)
def test_the_one_degree_that_is_minus_one_follows_from_the_world(
    degrees: dict[str, Any], data: st.DataObject
) -> None:
    world = world_of(degrees)
    missing = data.draw(st.sampled_from(axes_of(degrees)))
    if missing == "tp":
        degrees["etp"] = 1
    full = ParallelDims(**degrees, world_size=world)
    assert ParallelDims(**{**degrees, missing: -1}).resolve(world) == full
    assert ParallelDims(**{**degrees, missing: -1}, world_size=world) == full
    if missing == "dp_shard":
        assert ParallelDims(**{**degrees, missing: None}).resolve(world) == full


@given(fields())
@settings(deadline=None, max_examples=100)
def test_resolving_is_idempotent_and_refuses_another_world(degrees: dict[str, Any]) -> None:
    world = world_of(degrees)
    dims = ParallelDims(**degrees).resolve(world)
    assert dims.resolve(world) == dims
    with pytest.raises(ParallelDimsError, match=f"world_size={world + 1} .* world_size={world}"):
        dims.resolve(world + 1)


def test_no_degree_at_all_means_sharding_over_the_world() -> None:
    assert ParallelDims(world_size=8).dp_shard == 8
    assert ParallelDims(tp=4, world_size=8).dp_shard == 2
    one = ParallelDims(world_size=1)
    assert (one.dp_replicate, one.dp_shard, one.cp, one.tp, one.pp, one.ep) == (1,) * 6


def test_absent_dp_shard_is_one_where_another_degree_is_inferred() -> None:
    dims = ParallelDims(cp=2, tp=-1, world_size=8)
    assert (dims.dp_shard, dims.tp) == (1, 4)


@pytest.mark.parametrize("name", [*BASE, "ep", "etp"])
@pytest.mark.parametrize("value", [0, -2, True, 2.0, "two", "", "1.5", [2], "٤", "²", "+4", "1_0"])
def test_what_is_no_degree_is_refused(name: str, value: object) -> None:
    with pytest.raises(ParallelDimsError, match=rf"^{name}={re.escape(repr(value))} is not"):
        ParallelDims(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ep", "etp", "ulysses_degree", "world_size"])
def test_only_dense_degrees_can_be_inferred(name: str) -> None:
    with pytest.raises(ParallelDimsError, match=f"^{name}=-1 is not a degree"):
        ParallelDims(**{name: -1})  # type: ignore[arg-type]


def test_integers_of_other_types_and_strings_that_spell_one_are_degrees() -> None:
    dims = ParallelDims(
        tp=np.int64(2),  # type: ignore[arg-type]
        cp="2",  # type: ignore[arg-type]
        dp_shard=" -1\n",  # type: ignore[arg-type]
        world_size=" 8 ",  # type: ignore[arg-type]
    )
    assert [type(n) for n in (dims.tp, dims.cp, dims.dp_shard)] == [int] * 3
    assert (dims.tp, dims.cp, dims.dp_shard) == (2, 2, 2)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide world_size=4; use 1, 2 or 4"),
        ({"cp": 3}, "cp=3 does not divide world_size=4; use 1, 2 or 4"),
        ({"dp_shard": 3}, "dp_shard=3 is not world_size=4; use 4"),
        ({"dp_shard": 1}, "dp_shard=1 is not world_size=4; use 4"),
        (
            {"cp": 2, "tp": 4},
            "cp*tp=2*4=8 does not divide world_size=4; use cp=1, or tp=1 or 2",
        ),
        (
            {"dp_shard": 2, "cp": 2, "tp": 2},
            "dp_shard*cp*tp=2*2*2=8 is not world_size=4; use dp_shard=1, or cp=1, or tp=1",
        ),
        (
            {"cp": 5, "tp": 3},
            "cp*tp=5*3=15 does not divide world_size=4; use cp*tp=1, 2 or 4",
        ),
        (
            {"dp_shard": 1, "cp": 5, "tp": 3},
            "cp*tp=5*3=15 is not world_size=4; use cp*tp=4",
        ),
        (
            {"cp": 2, "ep": 5},
            "ep=5 does not divide dp_shard*cp*tp=4 (dp_shard=2, cp=2, tp=1); use 1, 2 or 4",
        ),
        (
            {"tp": 2, "etp": 2, "ep": 4},
            "ep=4*etp=2=8 does not divide dp_shard*cp*tp=4 (dp_shard=2, cp=1, tp=2); use ep=1 or 2",
        ),
        ({"tp": 4, "etp": 2}, "etp=2 is neither 1 nor tp=4; use 1 or 4"),
        ({"tp": -1, "etp": 2}, "etp=2 is neither 1 nor tp=4; use 1 or 4"),
        ({"ulysses_degree": 2}, "ulysses_degree=2 does not divide cp=1; use 1"),
        ({"cp": -1, "ulysses_degree": 3}, "ulysses_degree=3 does not divide cp=4; use 1, 2 or 4"),
        (
            {"dp_shard": -1, "tp": -1},
            "dp_shard and tp are -1, but only one degree can be "
            "inferred from the world; give the others a positive integer",
        ),
    ],
)
def test_errors_name_what_was_given_the_rule_and_what_is_legal(
    degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(**degrees).resolve(4)  # type: ignore[arg-type]
    assert str(caught.value) == message


@given(fields(max_world=64), st.sampled_from(BASE), st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_every_alternative_that_a_product_error_offers_is_legal(
    degrees: dict[str, Any], changed: str, value: int
) -> None:
    world = world_of(degrees)
    given = {name: degrees[name] for name in BASE} | {changed: value}
    inferred = {**given, "dp_shard": -1}
    for attempt in (given, inferred):
        try:
            ParallelDims(**attempt).resolve(world)
        except ParallelDimsError as error:
            (violation,) = error.violations
            assert violation.rule == "product"
            assert violation.legal
            for name, numbers in violation.legal.items():
                first, *others = name.split("*")
                for number in numbers:
                    change = {first: number, **dict.fromkeys(others, 1)}
                    ParallelDims(**{**attempt, **change}).resolve(world)


def test_all_bad_values_are_reported_at_once() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=0, cp=True, pp="x")  # type: ignore[arg-type]
    assert sorted(v.values.popitem()[0] for v in caught.value.violations) == ["cp", "pp", "tp"]  # type: ignore[attr-defined]


def test_rules_between_known_values_are_reported_together_and_before_the_world_is_known() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=2, etp=3, cp=2, ulysses_degree=3, order=("tp", "cp"))
    assert [v.rule for v in caught.value.violations] == ["etp", "ulysses", "order"]


def test_a_broken_product_hides_no_other_rule() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(etp=2, ep=3, tp=2, world_size=7)
    assert str(caught.value) == (
        "tp=2 does not divide world_size=7; use 1 or 7\n"
        "ep=3*etp=2=6 does not divide world_size=7; use ep*etp=1 or 7"
    )
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(dp_shard=2, tp=4, etp=2, ep=3, cp=2, ulysses_degree=3, world_size=9)
    assert [v.rule for v in caught.value.violations] == ["product", "etp", "ulysses", "sparse"]


def test_a_value_that_is_none_hides_only_the_rules_that_need_it() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(
            pp="x",  # type: ignore[arg-type]
            tp=3,
            etp=2,
            cp=2,
            ulysses_degree=3,
            order=("tp",),
            world_size=8,
        )
    rules = [v.rule for v in caught.value.violations]
    assert rules == ["value", "product", "etp", "ulysses", "order"]
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(tp=0, etp=2, ep=2, dp_shard=-1, cp=-1, world_size=8)
    assert [v.rule for v in caught.value.violations] == ["value", "one-inferred"]


@given(fields(max_world=64), st.data())
@settings(deadline=None, max_examples=150)
def test_what_is_found_next_to_a_value_that_is_none_is_found_whatever_it_should_have_been(
    degrees: dict[str, Any], data: st.DataObject
) -> None:
    names = [*axes_of(degrees), "ep", "etp"]
    broken = data.draw(st.sampled_from(names))
    changed = degrees | {data.draw(st.sampled_from(names)): data.draw(st.integers(1, 6))}
    world = data.draw(st.sampled_from([world_of(degrees), world_of(changed)]))

    def rules(value: object) -> set[str]:
        try:
            ParallelDims(**{**changed, broken: value}, world_size=world)
        except ParallelDimsError as error:
            return {v.rule for v in error.violations}
        return set()

    found = rules("x")
    assert "value" in found
    others = found - {"value"}
    for value in range(1, 13):
        # Experts that do not fit the world may fit a block that does not either.
        assert others - {"sparse"} <= rules(value)
        assert rules(value) or not others


@pytest.mark.parametrize("order", [("tp",), (*BASE, "tp"), (*BASE, "xp"), ()])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[str, ...]) -> None:
    with pytest.raises(ParallelDimsError, match=r"not a permutation .* \(ep may .* be left out\)"):
        ParallelDims(order=order)


def test_an_order_in_one_string_is_split_at_its_commas() -> None:
    together: Any = "tp, cp,dp_shard,dp_replicate,pp"
    assert ParallelDims(order=together) == ParallelDims(order=BASE[::-1])
    single: Any = "tp"
    with pytest.raises(ParallelDimsError, match=r"^order=\('tp',\) is not"):
        ParallelDims(order=single)


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys, iter])
def test_an_order_that_may_differ_between_processes_is_refused(kind: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"^order=.* is not a list of axis names"):
        ParallelDims(order=kind(BASE))
    assert ParallelDims(order=list(BASE)).order == BASE  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["9" * 5000, 10**5000, 2**32 + 1, "9" * 21], ids=range(4))
@pytest.mark.parametrize("name", ["tp", "ep", "ulysses_degree", "world_size"])
def test_more_ranks_than_there_can_be_are_refused_in_a_short_sentence(
    name: str, value: object
) -> None:
    with pytest.raises(ParallelDimsError, match=rf"^{name}=.* use at most 4294967296") as caught:
        ParallelDims(**{name: value})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_degrees_that_multiply_to_more_ranks_than_there_can_be_are_refused() -> None:
    dims = ParallelDims(dp_shard=2**20, pp=2**20)
    with pytest.raises(ParallelDimsError, match=r"^world_size=1099511627776 is not a degree"):
        dims.layout()


@pytest.mark.parametrize("world", [8.0, None, True, "x", 0, -1])
def test_resolving_for_what_is_no_number_of_ranks_is_refused(world: Any) -> None:
    for dims in (ParallelDims(), ParallelDims(world_size=8)):
        with pytest.raises(ParallelDimsError, match=r"^world_size=.* is not a degree; use a posit"):
            dims.resolve(world)


@pytest.mark.parametrize("world", ["8", np.int64(8)])
def test_resolving_takes_the_integers_that_degrees_may_be(world: Any) -> None:
    assert ParallelDims(world_size=8).resolve(world) == ParallelDims().resolve(world)


def test_expert_parallel_needs_no_place_in_the_order() -> None:
    assert ParallelDims(order=BASE, world_size=2).layout().size("ep") == 1


def test_peer_experts_are_a_factor_of_the_world_that_can_be_inferred() -> None:
    assert ParallelDims(ep=4, ep_mode="peer", world_size=8).dp_shard == 2
    assert ParallelDims(ep=-1, tp=2, ep_mode="peer", world_size=8).ep == 4
    with pytest.raises(ParallelDimsError, match="ep=3 does not divide world_size=8; use 1, 2, 4 "):
        ParallelDims(ep=3, ep_mode="peer", world_size=8)
    with pytest.raises(ParallelDimsError, match="ep=-1 is not a degree"):
        ParallelDims(ep=-1)
    with pytest.raises(ParallelDimsError, match="etp=-1 is not a degree"):
        ParallelDims(etp=-1, ep_mode="peer")


def test_an_order_of_peer_experts_has_to_place_them() -> None:
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert ParallelDims(order=order).order == order
    with pytest.raises(ParallelDimsError, match=r"'ep', 'cp', 'tp'.; give each of them once"):
        ParallelDims(order=order, ep_mode="peer")


def test_a_summary_has_every_degree_and_what_is_not_as_by_default() -> None:
    dims = ParallelDims(cp=2, ep=2, ulysses_degree=2, ep_mode="peer", fsdp_folds_cp=False)
    assert dims.resolve(8).summary() == (
        "pp=1 dp_replicate=1 dp_shard=2 cp=2 tp=1 ep=2 etp=1 ulysses=2 world=8 "
        "ep_mode=peer fsdp_folds_cp=False"
    )
    assert ParallelDims(tp=2).summary() == ("pp=1 dp_replicate=1 dp_shard=-1 cp=1 tp=2 ep=1 etp=1")


def test_etp_is_freed_by_an_option_where_experts_are_folded() -> None:
    dims = ParallelDims(tp=2, ep=2, etp=4, world_size=8, free_etp=True)
    assert (dims.efsdp, dims.etp) == (1, 4)
    assert dims.summary().endswith("ep=2 etp=4 world=8 free_etp=True")
    with pytest.raises(ParallelDimsError, match=r"ep=4\*etp=4=16 does not divide"):
        ParallelDims(tp=2, ep=4, etp=4, world_size=8, free_etp=True)
    with pytest.raises(ParallelDimsError, match="etp=4 is neither 1 nor tp=2; use 1 or 2"):
        ParallelDims(tp=2, dp_shard=4, etp=4, free_etp=True, ep_mode="peer")
    verdicts = {e.rule: e.verdict for e in dims.explain()}
    assert (verdicts["etp"], verdicts["sparse"]) == ("idle", "holds")
