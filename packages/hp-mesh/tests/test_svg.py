"""Pictures: valid XML, one cell for each rank, words inside their boxes."""

from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import LayoutError, ParallelDims
from hp_mesh.cli._rank_map import map_ranks
from hp_mesh.cli._rank_picture import draw_ranks
from hp_mesh.cli._svg import Canvas, fitted, text_width

from .strategies import dims

SVG = "{http://www.w3.org/2000/svg}"


def parse(picture: str) -> ElementTree.Element:
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    return root


def boxes(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [box for box in root.iter(f"{SVG}rect") if box.get("class") == kind]


def texts(root: ElementTree.Element) -> list[str]:
    return [str(text.text) for text in root.iter(f"{SVG}text")]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def box_of(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Give left, top, right and bottom; of a text for glyphs of 0.6 em, which is a usual mean."""
    x, y = number(element, "x"), number(element, "y")
    if element.tag == f"{SVG}rect":
        return x, y, x + number(element, "width"), y + number(element, "height")
    size = number(element, "font-size")
    width = 0.6 * size * len(element.text or "")
    left = (
        x - {"start": 0.0, "middle": width / 2, "end": width}[element.get("text-anchor", "start")]
    )
    return left, y - 0.8 * size, left + width, y + 0.25 * size


def assert_inside(root: ElementTree.Element) -> None:
    left, top, right, bottom = map(float, str(root.get("viewBox")).split())
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text"):
            x0, y0, x1, y1 = box_of(element)
            assert left <= x0 <= x1 <= right, ElementTree.tostring(element)
            assert top <= y0 <= y1 <= bottom, ElementTree.tostring(element)


@given(dims(max_world=64), st.integers(1, 9), st.data())
@settings(deadline=None, max_examples=40)
def test_each_rank_has_one_cell_that_tells_its_coordinates(
    drawn: ParallelDims, ranks_per_node: int, data: st.DataObject
) -> None:
    layout = drawn.layout()
    axis = data.draw(st.sampled_from(layout.names))
    root = parse(draw_ranks(map_ranks(drawn, ranks_per_node, axis)))
    cells = boxes(root, "rank")
    hints = [str(cell.findtext(f"{SVG}title")) for cell in cells]
    ranks = [int(hint.split(":")[0].removeprefix("rank ")) for hint in hints]
    assert ranks == list(range(layout.world_size))
    for rank, hint in zip(ranks, hints, strict=True):
        told = dict(word.split("=") for word in hint.split(":")[1].split())
        place = {name: str(i) for name, i in layout.coordinates(rank).items()}
        assert {name: i for name, i in told.items() if name in place}.items() <= place.items()
        assert {name for name in place if layout.size(name) > 1} <= told.keys()
    assert len(boxes(root, "node")) == -(-layout.world_size // ranks_per_node)
    assert_inside(root)


@given(dims(max_world=64), st.data())
@settings(deadline=None, max_examples=30)
def test_ranks_of_one_group_share_a_colour_and_a_number(
    drawn: ParallelDims, data: st.DataObject
) -> None:
    axis = data.draw(st.sampled_from(drawn.layout().names))
    found = map_ranks(drawn, 8, axis)
    fills = [str(cell.get("fill")) for cell in boxes(parse(draw_ranks(found)), "rank")]
    groups = drawn.layout().groups(axis)
    assert {fills[rank] for rank in groups[0]} == {fills[groups[0][0]]}
    assert len({fills[group[0]] for group in groups[:8]}) == len(groups[:8])
    marks = Counter(text for text in texts(parse(draw_ranks(found))) if text[1:].isdigit())
    assert all(marks[f"#{number}"] == len(group) for number, group in enumerate(groups))


@given(dims(max_world=64))
@settings(deadline=None, max_examples=30)
def test_names_that_are_told_together_have_the_same_groups(drawn: ParallelDims) -> None:
    layout = drawn.layout()
    families = map_ranks(drawn, 8, None).families()
    told = [name for names in families for name in names]
    assert sorted(told) == sorted(n for n in layout.names if layout.size(n) > 1)
    for names in families:
        assert all(layout.groups(name) == layout.groups(names[0]) for name in names)


def test_no_text_of_a_cell_leaves_the_cell() -> None:
    found = map_ranks(ParallelDims(dp_replicate=2, tp=8, cp=2, world_size=64), 8, "tp")
    root = parse(draw_ranks(found))
    cells = [box_of(cell) for cell in boxes(root, "rank")]
    inside = 0
    for text in root.iter(f"{SVG}text"):
        x, y = number(text, "x"), number(text, "y")
        for x0, y0, x1, y1 in cells:
            if x0 < x < x1 and y0 < y < y1:
                left, top, right, bottom = box_of(text)
                assert x0 <= left
                assert right <= x1
                assert y0 <= top
                assert bottom <= y1
                inside += 1
    # Each cell has the rank, its group and one line for each of the four axes.
    assert inside == 64 * (2 + 4)


@pytest.mark.parametrize(("world", "ranks_per_node"), [(4096, 8), (600, 1), (8192, 4096), (90, 90)])
def test_a_large_world_is_drawn_in_part_and_says_so(world: int, ranks_per_node: int) -> None:
    root = parse(draw_ranks(map_ranks(ParallelDims(tp=2, world_size=world), ranks_per_node, None)))
    drawn = len(boxes(root, "rank"))
    assert drawn < world
    assert any("left out" in text or "more" in text for text in texts(root))
    hints = [str(cell.findtext(f"{SVG}title")) for cell in boxes(root, "rank")]
    assert hints[0].startswith("rank 0:")
    assert hints[-1].startswith(f"rank {world - 1}:")
    assert_inside(root)


def test_what_is_drawn_and_what_is_left_out_add_up() -> None:
    root = parse(draw_ranks(map_ranks(ParallelDims(tp=8, world_size=1024), 8, None)))
    (left_out,) = [int(t.split()[0]) for t in texts(root) if t.endswith("nodes left out")]
    assert len(boxes(root, "node")) + left_out == 128
    assert len(boxes(root, "gap")) == 1


def test_long_numbers_of_ranks_and_groups_are_not_cut() -> None:
    found = map_ranks(ParallelDims(tp=2, world_size=131072), 8, None)
    words = texts(parse(draw_ranks(found)))
    assert {"131071", "#65535"} <= {*words}
    assert not any("…" in word for word in words)


def test_ranks_without_nodes_are_drawn_in_one_box_that_says_so() -> None:
    root = parse(draw_ranks(map_ranks(ParallelDims(dp_shard=12, world_size=12), None, None)))
    assert len(boxes(root, "node")) == 1
    assert len(boxes(root, "rank")) == 12
    assert "all ranks" in texts(root)
    assert any("nodes not known" in text and "dp_shard" in text for text in texts(root))
    assert "node 0" not in texts(root)
    assert_inside(root)


@pytest.mark.parametrize(
    ("tp", "line"), [(4, "2 tp groups of 4 ranks each"), (8, "1 tp group of 8 ranks")]
)
def test_the_number_of_groups_is_told_apart_from_their_size(tp: int, line: str) -> None:
    root = parse(draw_ranks(map_ranks(ParallelDims(tp=tp, world_size=8), 8, "tp")))
    assert f"colour and #: {line}" in texts(root)


def test_a_legend_names_the_ranks_of_the_groups() -> None:
    root = parse(draw_ranks(map_ranks(ParallelDims(tp=4, world_size=8), 8, "tp")))
    assert len(boxes(root, "legend")) == 2
    assert {"#0 tp: 0-3", "#1 tp: 4-7"} <= {*texts(root)}


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="no axis 'tensor'"):
        map_ranks(ParallelDims(tp=4, world_size=8), 8, "tensor")


@given(st.text(max_size=40), st.floats(6, 30), st.floats(0, 400))
@settings(deadline=None, max_examples=100)
def test_fitted_text_is_a_start_of_the_text_that_fits(text: str, size: float, room: float) -> None:
    kept = fitted(text, size, room)
    assert text_width(kept, size) <= room
    assert kept == text or (text.startswith(kept.removesuffix("…").rstrip()) and kept != text)


def test_text_is_escaped() -> None:
    canvas = Canvas(200, 50, "a < b & c")
    canvas.text(5, 20, "<&>", size=12, room=100)
    root = parse(canvas.render())
    assert root.findtext(f"{SVG}title") == "a < b & c"
    assert texts(root) == ["<&>"]
