"""Expected bytes are those of counting every routing, and the choice follows them."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_dtensor import AlphaBeta
from hp_ep import ExpertConfigError, choose_dispatcher
from hp_ep.dispatch._cost import expected_bytes, expected_seconds


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    """Draw sizes small enough to list every choice of experts."""
    nodes, node_size, local = (draw(st.integers(1, 3)) for _ in range(3))
    experts = nodes * node_size * local
    return dict(
        num_ranks=nodes * node_size,
        node_size=node_size,
        num_experts=experts,
        top_k=draw(st.integers(1, min(4, experts))),
        row_bytes=draw(st.integers(1, 4096)),
    )


@settings(deadline=None, max_examples=60)
@given(sizes())
def test_expected_bytes_are_the_mean_over_all_choices(size: dict[str, int]) -> None:
    ranks, node, row = size["num_ranks"], size["node_size"], size["row_bytes"]
    local = size["num_experts"] // ranks
    totals = {k: [0.0, 0.0] for k in ("all_to_all", "dedup", "hierarchical")}
    chosen = list(combinations(range(size["num_experts"]), size["top_k"]))
    for me in range(ranks):
        for choice in chosen:
            owners = [e // local for e in choice]
            for owner in owners:
                off = owner // node != me // node
                if owner != me:
                    totals["all_to_all"][not off] += 2 * row
                    totals["dedup"][not off] += 8
                totals["hierarchical"][0] += 8 * off
                stop = owner // node * node + me % node  # where the first hop puts the token
                totals["hierarchical"][1] += 8 * (stop != owner)
            for target in sorted(set(owners)):
                away = target // node != me // node
                if target != me:
                    totals["dedup"][not away] += 2 * row
                stop = target // node * node + me % node
                totals["hierarchical"][1] += 2 * row * (stop != target)
            for n in {o // node for o in owners}:
                totals["hierarchical"][0] += 2 * row * (n != me // node)
    for kind, (outside, inside) in totals.items():
        found = expected_bytes(kind, **size)  # type: ignore[arg-type]
        assert found.off_node == pytest.approx(outside / ranks / len(chosen))
        assert found.in_node == pytest.approx(inside / ranks / len(chosen))


def test_published_sizes_save_what_they_should() -> None:
    def rows(kind: Any, ranks: int, experts: int, node_size: int | None = None) -> float:
        found = expected_bytes(
            kind,
            num_ranks=ranks,
            num_experts=experts,
            top_k=8,
            row_bytes=10**9,
            node_size=node_size,
        )
        return (found.off_node if node_size else found.total) / 2e9

    assert rows("all_to_all", 2, 64) / rows("dedup", 2, 64) == pytest.approx(4.0, abs=0.05)
    assert rows("all_to_all", 4, 64) / rows("dedup", 4, 64) == pytest.approx(2.2, abs=0.05)
    assert rows("all_to_all", 64, 256, 8) == pytest.approx(7.0)
    assert rows("hierarchical", 64, 256, 8) == pytest.approx(4.6, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k", "row", "node", "best"),
    [
        (1, 8, 2, 1024, None, "local"),
        (2, 64, 8, 1024, None, "dedup"),
        (4, 64, 8, 1024, None, "dedup"),
        (32, 64, 2, 1024, None, "all_to_all"),
        (2, 64, 1, 1024, None, "all_to_all"),
        (2, 64, 8, 4, None, "all_to_all"),  # a row is no larger than a choice's own bytes
        (64, 256, 8, 14336, 8, "hierarchical"),
        (64, 256, 8, 14336, 64, "all_to_all"),
        (64, 256, 1, 14336, 8, "all_to_all"),
    ],
)
def test_the_choice_is_the_simplest_that_is_not_much_worse(
    ranks: int, experts: int, top_k: int, row: int, node: int | None, best: str
) -> None:
    found = choose_dispatcher(
        num_ranks=ranks, num_experts=experts, top_k=top_k, row_bytes=row, node_size=node
    )
    assert found == best


SIZES: dict[str, Any] = dict(num_ranks=16, num_experts=64, top_k=8, row_bytes=4096)
FREE, DEAR = 0.0, 1.0


@pytest.mark.parametrize(
    ("alpha", "beta", "best"),
    [
        # Bytes between nodes alone: a token crosses to each node once.
        ((FREE, FREE), (1e-6, FREE), "hierarchical"),
        # Bytes inside a node alone: hops inside carry the tokens of all other nodes too.
        ((FREE, FREE), (FREE, 1e-6), "dedup"),
        # Calls alone: one less of each kind, and none over a second axis.
        ((DEAR, DEAR), (FREE, FREE), "all_to_all"),
        # Nothing but operators.
        ((FREE, FREE), (FREE, FREE), "all_to_all"),
    ],
)
def test_the_choice_follows_the_cheaper_price_on_given_links(
    alpha: tuple[float, float], beta: tuple[float, float], best: str
) -> None:
    links = AlphaBeta(alpha=alpha, beta=beta)
    assert choose_dispatcher(**SIZES, node_size=4, num_tokens=256, links=links) == best


def test_few_tokens_are_not_worth_the_operators_of_fewer_bytes() -> None:
    sizes: dict[str, Any] = dict(num_ranks=8, num_experts=64, top_k=8, row_bytes=4096)
    assert choose_dispatcher(**sizes, num_tokens=16) == "all_to_all"
    assert choose_dispatcher(**sizes, num_tokens=16384) == "dedup"


@settings(deadline=None, max_examples=60)
@given(
    sizes(),
    st.integers(1, 8192),
    st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)),
    st.tuples(st.floats(0, 1e-8), st.floats(0, 1e-8)),
)
def test_no_other_dispatcher_has_a_much_lower_price(
    size: dict[str, Any], tokens: int, alpha: tuple[float, float], beta: tuple[float, float]
) -> None:
    more: Any = dict(**size, num_tokens=tokens, links=AlphaBeta(alpha=alpha, beta=beta))
    chosen = choose_dispatcher(**more)
    kinds: list[Any] = ["all_to_all", "dedup"] if size["num_ranks"] > 1 else ["local"]
    kinds += ["hierarchical"] * (1 < size["node_size"] < size["num_ranks"])
    assert chosen in kinds
    prices = [expected_seconds(kind, **more) for kind in kinds]
    price = prices[kinds.index(chosen)]
    assert price <= 1.1**2 * min(prices)
    assert all(simpler >= price for simpler in prices[: kinds.index(chosen)])


def test_a_price_grows_with_tokens_bytes_and_latency() -> None:
    def price(tokens: int = 64, row: int = 64, alpha: float = 0.0, beta: float = 1e-9) -> float:
        links = AlphaBeta(alpha=alpha, beta=beta)
        more: Any = dict(num_ranks=4, num_experts=8, top_k=2, row_bytes=row, num_tokens=tokens)
        return expected_seconds("dedup", **more, links=links)

    assert price() < price(tokens=128) < price(tokens=128, row=128)
    assert price(alpha=1.0) - price() == pytest.approx(7)  # an all-to-all each
    assert price() < price(beta=2e-9)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ExpertConfigError, match="num_ranks=3 must divide num_experts=8"):
        expected_bytes("dedup", num_ranks=3, num_experts=8, top_k=2, row_bytes=4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(top_k=9), "top_k=9 of num_experts=8 experts; use an integer from 1 to 8"),
        (dict(top_k=0), "top_k=0 of num_experts=8 experts"),
        (dict(num_ranks=0), "num_ranks=0 must be a positive integer"),
        (dict(num_ranks=2.0), "num_ranks=2.0 must be a positive integer"),
        (dict(row_bytes=-1), "row_bytes=-1 must be a positive integer"),
        (dict(node_size=0), "node_size=0 must be a positive integer"),
        (dict(num_ranks=1, top_k=9), "top_k=9 of num_experts=8 experts"),
    ],
)
def test_numbers_that_make_no_layer_are_refused(change: dict[str, Any], text: str) -> None:
    given_numbers = {**dict(num_ranks=2, num_experts=8, top_k=2, row_bytes=4), **change}
    with pytest.raises(ExpertConfigError, match=text):
        choose_dispatcher(**given_numbers)
    with pytest.raises(ExpertConfigError, match=text):
        expected_bytes("dedup", **given_numbers)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(num_tokens=0), "num_tokens=0 must be a positive integer"),
        (
            dict(links=AlphaBeta(beta=(1e-9,))),
            r"must be an AlphaBeta whose alpha and beta",
        ),
        (dict(links=AlphaBeta(alpha=(0.0, 0.0, 0.0))), "pairs: between nodes, and inside one"),
        (dict(links="fast"), "links='fast' must be an AlphaBeta"),
    ],
)
def test_numbers_that_make_no_price_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ExpertConfigError, match=text):
        choose_dispatcher(**SIZES, **change)


def test_a_dispatcher_that_does_not_exist_is_refused() -> None:
    kind: Any = "bogus"
    with pytest.raises(ExpertConfigError, match="kind='bogus' is not one of"):
        expected_bytes(kind, num_ranks=2, num_experts=8, top_k=2, row_bytes=4)
