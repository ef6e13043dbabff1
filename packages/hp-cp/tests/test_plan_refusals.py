"""What makes no plan is refused, with what would."""

from typing import Any

import pytest

from hp_cp import (
    Auto,
    Contiguous,
    DoubleRing,
    Greedy,
    InputError,
    Layout,
    MaskSpec,
    PerDocument,
    Zigzag,
    plan_attention,
)

CAUSAL = MaskSpec(causal=True)


@pytest.mark.parametrize("degree", [3, 0, 8, -1])
def test_a_degree_that_does_not_divide_names_the_legal_ones(degree: int) -> None:
    said = f"ulysses_degree={degree} does not divide 4 context parallel ranks; use 1, 2 or 4"
    with pytest.raises(InputError) as caught:
        plan_attention(CAUSAL, None, 4, 8, ulysses_degree=degree, q_heads=8, kv_heads=8)
    assert str(caught.value) == said


@pytest.mark.parametrize("degree", [0, 2])
def test_on_one_rank_one_degree_is_named(degree: int) -> None:
    with pytest.raises(InputError) as caught:
        plan_attention(CAUSAL, None, 1, 8, ulysses_degree=degree, q_heads=2)
    said = f"ulysses_degree={degree} does not divide one context parallel rank; use 1"
    assert str(caught.value) == said


def test_fewer_heads_than_ulysses_ranks_are_named_with_the_degrees_that_work() -> None:
    with pytest.raises(InputError) as caught:
        plan_attention(CAUSAL, None, 64, 64, ulysses_degree=64, q_heads=40, kv_heads=8)
    assert str(caught.value) == (
        "40 query heads and 8 kv heads cannot give each of 64 Ulysses ranks a head; use "
        "ulysses_degree=1, 2, 4, 8, 16 or 32, and a schedule across the others"
    )


def test_heads_without_equal_groups_are_named() -> None:
    said = "4 query heads do not form equal groups over 3 kv heads"
    with pytest.raises(InputError, match=said):
        plan_attention(CAUSAL, None, 4, 8, q_heads=4, kv_heads=3)


def test_inner_rings_that_do_not_divide_are_named() -> None:
    with pytest.raises(InputError, match=r"inner=4 ranks do not divide the 6 .* \[1, 2, 3, 6\]"):
        plan_attention(CAUSAL, None, 6, 12, schedule=DoubleRing(4))


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"ulysses_degree": 2, "q_heads": 2}, InputError, "ulysses_degree=2 and schedule='gath"),
        ({"schedule": "ring"}, InputError, "and schedule='ring'; use ulysses_degree=1"),
        ({"layout": Zigzag()}, InputError, r"for Contiguous sequences, got Zigzag\(\)"),
        ({"seq_len": 12}, InputError, "12 positions on 4 ranks .* multiple of 8"),
    ],
)
def test_swapped_halves_want_gathered_contiguous_even_lengths(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    given = {"layout": None, "seq_len": 16, "schedule": "gather", **options}
    with pytest.raises(kind, match=said):
        plan_attention(CAUSAL, n=4, load_balance=True, **given)


@pytest.mark.parametrize(
    ("mask", "said"),
    [(True, "True"), (None, "None"), ("causal", "'causal'"), ([], "an object of type list")],
)
def test_a_mask_that_is_no_spec_is_refused(mask: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"got {said}; use MaskSpec\(causal=True\) or"):
        plan_attention(mask, None, 2, 8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": 1}, "causal is 1; use True or False"),
        ({"window": 0}, "window=0 is no number of keys; use an int of at least 1"),
        ({"window": True}, "window=True"),
        ({"window": 2.0}, "window=2.0 is no number of keys"),
        ({"cu_seqlens": [0, 8]}, r"tuple of ints, got an object of type list; .*tolist\(\)\)"),
        ({"cu_seqlens": (0, 2.0)}, "tuple of ints"),
        ({"cu_seqlens": ((0, 3, 8), (0, 9))}, "rows of a batch end at"),
        ({"cu_seqlens": (1, 8)}, r"ascend from 0 .* got \(1, 8\)"),
        ({"cu_seqlens": (0, 5, 3, 8)}, "ascend from 0"),
        ({"cu_seqlens": (0,)}, "ascend from 0"),
        ({"cu_seqlens": (0, *range(20, 3, -1))}, r"\(0, 20, 19, .*, \.\.\. 18 numbers\)"),
    ],
)
def test_a_mask_that_shows_nothing_or_contradicts_itself_is_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        MaskSpec(**{"causal": True, **options})


def test_documents_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match="cu_seqlens end at 9 but the sequence has 8 positions"):
        plan_attention(MaskSpec(causal=True, cu_seqlens=(0, 9)), None, 2, 8)


@pytest.mark.parametrize(
    ("layout", "said"), [("zigzag", "'zigzag'"), (Zigzag, "the class Zigzag"), (2, "2")]
)
def test_a_layout_that_is_none_is_refused(layout: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"got {said}; use Contiguous\(\), Zigzag\(\) or"):
        plan_attention(CAUSAL, layout, 2, 8)


def test_an_object_with_both_methods_is_a_layout() -> None:
    class Own:
        def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
            return Contiguous().chunks(n, seq_len)

        def indices(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
            return Contiguous().indices(n, seq_len)

    assert plan_attention(CAUSAL, Own(), 2, 8).lengths == (4, 4)


def test_a_layout_without_a_hash_is_refused() -> None:
    class Own(Contiguous):
        __slots__ = ("cuts",)

        def __hash__(self) -> int:
            return hash([])

    with pytest.raises(InputError, match="has no hash, by which plans are kept"):
        plan_attention(CAUSAL, Own(), 2, 8)


@pytest.mark.parametrize(
    ("n", "seq_len"), [(0, 8), (-1, 8), (2.0, 8), ("2", 8), (True, 8), (2, -1), (2, 8.0), (2, "8")]
)
def test_a_number_of_ranks_or_a_length_that_is_none_is_refused(n: Any, seq_len: Any) -> None:
    with pytest.raises(InputError, match=f"got n={n!r}, seq_len={seq_len!r}"):
        plan_attention(CAUSAL, None, n, seq_len)


def test_an_unknown_schedule_is_named() -> None:
    said = r"no schedule 'rong'; use one of \['gather', 'direct', 'ring', 'double_ring'\]"
    with pytest.raises(InputError, match=said):
        plan_attention(CAUSAL, None, 4, 8, schedule="rong")  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", [2.0, "2", 0, -1, True])
def test_a_double_ring_of_no_number_of_ranks_is_refused(inner: Any) -> None:
    with pytest.raises(InputError, match=f"inner={inner!r} is no number of ranks; use a divisor"):
        DoubleRing(inner)


def test_a_degree_that_is_text_is_shown_as_such() -> None:
    with pytest.raises(InputError, match=r"ulysses_degree='2' does not divide 4 .* use 1, 2 or 4"):
        plan_attention(CAUSAL, None, 4, 8, ulysses_degree="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"itemsize": -4}, InputError, "itemsize=-4 is no size; use an int from 1 on"),
        ({"itemsize": 0}, InputError, "itemsize=0 is no size"),
        ({"batch": None}, InputError, "batch=None is no size; use an int from 0 on"),
        ({"head_size": -1}, InputError, "head_size=-1 is no size"),
        ({"head_size": 8.0}, InputError, "head_size=8.0 is no size"),
        ({"value_size": -1}, InputError, "value_size=-1 is no size"),
        ({"value_size": True}, InputError, "value_size=True is no size"),
        ({"q_heads": "8"}, InputError, "numbers of heads are ints, got q_heads='8'"),
        ({"kv_heads": 2.0}, InputError, "numbers of heads are ints, .* kv_heads=2.0"),
        ({"keep_kv": "no"}, InputError, "keep_kv is 'no'; use True, False or None"),
        ({"load_balance": "no"}, InputError, "load_balance is 'no'; use True or False"),
        ({"load_balance": None}, InputError, "load_balance is None; use True or False"),
    ],
)
def test_sizes_and_flags_that_are_none_make_no_plan(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        plan_attention(CAUSAL, None, 2, 8, **options)


@pytest.mark.parametrize("rank", [4, -1, 1.0, "1", True])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_plan_has_no_other_ranks_than_its_own(rank: Any, degree: int) -> None:
    plan = plan_attention(CAUSAL, None, 4, 8, ulysses_degree=degree)
    for ask in (plan.blocks, plan.fetches, plan.bytes_received):
        with pytest.raises(InputError, match=f"a plan of 4 ranks has no rank {rank!r}; use 0 to 3"):
            ask(rank)


@pytest.mark.parametrize("layout", [PerDocument(), Greedy(), Auto()])
@pytest.mark.parametrize("mask", [(0, 8), "causal", [0, 8]], ids=str)
def test_layouts_that_follow_the_mask_want_a_mask(layout: Layout, mask: Any) -> None:
    with pytest.raises(InputError, match=r"mask must be a MaskSpec, got .*; use MaskSpec\(causal"):
        layout.indices(2, 8, mask)


@pytest.mark.parametrize("chunks_per_rank", [0, 1.5, True])
def test_greedy_wants_at_least_one_chunk_per_rank(chunks_per_rank: Any) -> None:
    with pytest.raises(InputError, match=f"chunks_per_rank={chunks_per_rank} leaves"):
        Greedy(chunks_per_rank)


@pytest.mark.parametrize("layout", [PerDocument(), Greedy(), Auto()])
def test_layouts_that_follow_the_mask_want_it(layout: Layout) -> None:
    with pytest.raises(InputError, match=r"follows the mask; give the mask, mask=MaskSpec"):
        layout.indices(2, 8)


@pytest.mark.parametrize(
    "chunks",
    [
        ((range(0, 4),), (range(3, 8),)),
        ((range(0, 4),), (range(5, 8),)),
        ((range(0, 4),), (range(4, 7),)),
        ((range(4, 8), range(0, 2)), (range(2, 4),)),
        ((range(0, 8),),),
        ((range(0, 8, 2),), (range(1, 8, 2),)),
        ((range(0, 8), range(8, 8)), ()),
    ],
    ids=["overlap", "hole", "short", "descending", "ranks", "step", "empty"],
)
def test_a_layout_that_is_no_partition_is_refused(chunks: Any) -> None:
    class Wrong(Layout):
        def chunks(self, n: int, seq_len: int, mask: MaskSpec | None = None) -> Any:
            return chunks

    with pytest.raises(InputError, match=r"partition range\(8\)"):
        plan_attention(CAUSAL, Wrong(), 2, 8)
