"""Pictures: one cell for each rank, one row for each candidate, words inside their boxes."""

from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from hp_mesh import LayoutError, ParallelDims
from hp_mesh.cli._answers import map_ranks
from hp_mesh.cli._pictures import MEMORY_COLOURS, TIME_COLOURS, draw_plan, draw_ranks
from hp_mesh.cli._plans import plan_rows
from hp_mesh.planner import MODELS, Candidate, Cluster, Plan, TrainSpec, plan
from hp_mesh.planner._result import GIB

from .strategies import dims
from .test_cli import run

PLAN = ["plan", "--model", "llama3-70b", "--gpus", "256", "--seq-len", "8192"]
PLAN += ["--global-batch", "512"]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(
        MODELS["llama3-70b"],
        Cluster(world_size=256, accelerator="H100"),
        TrainSpec(seq_len=8192, global_batch=512),
    )


def named(figure: Figure, start: str) -> dict[str, Patch]:
    """Give the boxes of a picture whose name has this start, in the order in which they are."""
    boxes = figure.findobj(lambda artist: str(artist.get_gid()).startswith(start))
    return {str(box.get_gid()): box for box in boxes if isinstance(box, Patch)}


def texts(figure: Figure) -> list[str]:
    """Give the lines of all texts."""
    return [line for text in figure.findobj(Text) for line in text.get_text().splitlines()]


def fill(box: Patch) -> str:
    return to_hex(box.get_facecolor())


def extent(figure: Figure, artist: Artist) -> Bbox:
    if not isinstance(figure.canvas, FigureCanvasAgg):
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()  # which places the legends
    return artist.get_window_extent()


def assert_inside(figure: Figure) -> None:
    """Every text lies on the paper."""
    whole = figure.bbox
    for text in figure.findobj(Text):
        if text.get_text():
            box = extent(figure, text)
            assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
            assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text


@given(dims(max_world=16), st.integers(1, 9), st.data())
@settings(deadline=None, max_examples=6)
def test_each_rank_has_one_cell_in_its_node(
    drawn: ParallelDims, ranks_per_node: int, data: st.DataObject
) -> None:
    layout = drawn.layout()
    axis = data.draw(st.sampled_from(layout.names))
    figure = draw_ranks(map_ranks(drawn, ranks_per_node, axis))
    cells, nodes = named(figure, "rank "), named(figure, "node ")
    assert [*cells] == [f"rank {rank}" for rank in range(layout.world_size)]
    assert len(nodes) == -(-layout.world_size // ranks_per_node)
    for rank, cell in enumerate(cells.values()):
        node = extent(figure, nodes[f"node {rank // ranks_per_node}"])
        inner = extent(figure, cell)
        assert node.x0 < inner.x0 < inner.x1 < node.x1
        assert node.y0 < inner.y0 < inner.y1 < node.y1
    assert_inside(figure)


@given(dims(max_world=32), st.data())
@settings(deadline=None, max_examples=10)
def test_ranks_of_one_group_share_a_colour_and_a_number(
    drawn: ParallelDims, data: st.DataObject
) -> None:
    axis = data.draw(st.sampled_from(drawn.layout().names))
    figure = draw_ranks(map_ranks(drawn, 8, axis))
    fills = [fill(cell) for cell in named(figure, "rank ").values()]
    groups = drawn.layout().groups(axis)
    assert {fills[rank] for rank in groups[0]} == {fills[groups[0][0]]}
    assert len({fills[group[0]] for group in groups[:8]}) == len(groups[:8])
    marks = Counter(text for text in texts(figure) if text[1:].isdigit())
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


def test_the_texts_of_a_cell_tell_its_place_and_stay_inside_it() -> None:
    found = map_ranks(ParallelDims(dp_replicate=2, tp=8, cp=2, world_size=64), 8, "tp")
    figure = draw_ranks(found)
    words = [(text.get_text(), extent(figure, text)) for text in figure.findobj(Text)]
    for rank, cell in enumerate(named(figure, "rank ").values()):
        box = extent(figure, cell)
        inside = {
            line
            for t, b in words
            for line in t.splitlines()
            if box.x0 < b.x0 and b.x1 < box.x1 and box.y0 < b.y0 and b.y1 < box.y1
        }
        place = {f"{axis} {index}" for axis, index in found.coordinates(rank).items()}
        assert inside == {str(rank), f"#{found.group_of[rank]}"} | place


@pytest.mark.parametrize(("world", "ranks_per_node"), [(4096, 8), (600, 1), (90, 90)])
def test_a_large_world_is_drawn_in_part_and_says_so(world: int, ranks_per_node: int) -> None:
    figure = draw_ranks(map_ranks(ParallelDims(tp=2, world_size=world), ranks_per_node, None))
    cells = [*named(figure, "rank ")]
    assert len(cells) < world
    assert any("left out" in text or "more" in text for text in texts(figure))
    assert (cells[0], cells[-1]) == ("rank 0", f"rank {world - 1}")
    left_out = [int(t.split()[0]) for t in texts(figure) if t.endswith("nodes left out")]
    nodes = -(-world // ranks_per_node)
    assert len(named(figure, "node ")) + sum(left_out) == nodes
    assert len(named(figure, "gap")) == len(left_out)


def test_long_numbers_of_ranks_and_groups_are_not_cut() -> None:
    words = texts(draw_ranks(map_ranks(ParallelDims(tp=2, world_size=131072), 2, None)))
    assert {"131071", "#65535"} <= {*words}


def test_ranks_without_nodes_are_drawn_in_one_box_that_says_so() -> None:
    figure = draw_ranks(map_ranks(ParallelDims(dp_shard=12, world_size=12), None, None))
    assert (len(named(figure, "node ")), len(named(figure, "rank "))) == (1, 12)
    assert "all ranks" in texts(figure)
    assert any("nodes not known" in text and "dp_shard" in text for text in texts(figure))
    assert "node 0" not in texts(figure)


@pytest.mark.parametrize(
    ("tp", "line"), [(4, "2 tp groups of 4 ranks each"), (8, "1 tp group of 8 ranks")]
)
def test_the_number_of_groups_is_told_apart_from_their_size(tp: int, line: str) -> None:
    figure = draw_ranks(map_ranks(ParallelDims(tp=tp, world_size=8), 8, "tp"))
    assert f"colour and #: {line}" in texts(figure)


def test_a_legend_names_the_ranks_of_the_groups() -> None:
    figure = draw_ranks(map_ranks(ParallelDims(tp=4, world_size=8), 8, "tp"))
    assert len(named(figure, "legend ")) == 2
    assert {"#0 tp: 0-3", "#1 tp: 4-7"} <= {*texts(figure)}


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(LayoutError, match="no axis 'tensor'"):
        map_ranks(ParallelDims(tp=4, world_size=8), 8, "tensor")


def drawn(found: Plan) -> list[Candidate]:
    """Give the candidates of the picture's eight rows."""
    return [row.candidate for row in plan_rows(found, 8)]


def lengths(figure: Figure, unit: str) -> list[float]:
    """Give the length of each row's bar of seconds or of memory."""
    rows: dict[float, float] = {}
    for bar in figure.findobj(lambda a: str(a.get_gid()).endswith(f" {unit}")):
        assert isinstance(bar, Patch)
        box = extent(figure, bar)
        rows[round(-box.y0)] = rows.get(round(-box.y0), 0.0) + box.width
    return [rows[y] for y in sorted(rows)]


def test_bars_are_as_long_as_what_they_stand_for_and_the_limit_is_where_its_would_end(
    planned: Plan,
) -> None:
    figure = draw_plan(planned)
    rows = drawn(planned)
    seconds = lengths(figure, "s")
    scale = seconds[0] / rows[0].time.total
    assert seconds == pytest.approx([row.time.total * scale for row in rows], rel=0.01)
    needs = [row.memory.total for row in rows]
    gibibytes = lengths(figure, "GiB")
    assert len(set(needs)) > 1
    scale = gibibytes[0] / needs[0]
    assert gibibytes == pytest.approx([need * scale for need in needs], rel=0.01)
    (limit,) = figure.findobj(lambda artist: artist.get_gid() == "limit")
    left = min(extent(figure, b).x0 for b in figure.findobj(_is_memory))
    line = extent(figure, limit)
    assert (line.x0 + line.x1) / 2 - left == pytest.approx(rows[0].limit * scale, rel=0.02)


def _is_memory(artist: Artist) -> bool:
    return str(artist.get_gid()).endswith(" GiB")


def test_the_picture_has_a_row_for_each_candidate(planned: Plan) -> None:
    figure = draw_plan(planned)
    words = texts(figure)
    for candidate in drawn(planned):
        assert any(text.startswith(f"{candidate.memory.total / GIB:.1f} GiB") for text in words)
    assert any(text.startswith("limit ") for text in words)
    assert len(named(figure, "compute: ")) >= 1
    assert_inside(figure)


@pytest.mark.parametrize(
    ("model", "gpus", "options"),
    [
        ("mixtral-8x7b", 64, {}),
        ("mixtral-8x7b", 64, {"schedule": "any", "zero": "any"}),
        ("llama3-8b", 8, {}),
    ],
)
def test_parts_have_the_colour_of_their_name_in_every_plan(
    model: str, gpus: int, options: dict[str, Any]
) -> None:
    found = plan(
        MODELS[model],
        Cluster(world_size=gpus, accelerator="H100"),
        TrainSpec(seq_len=4096, global_batch=1024, **options),
    )
    figure = draw_plan(found)
    parts = named(figure, "")
    told = {gid: part for gid, part in parts.items() if gid.endswith((" s", " GiB"))}
    assert told
    for gid, part in told.items():
        colours = TIME_COLOURS if gid.endswith(" s") else MEMORY_COLOURS
        assert fill(part) == colours[gid.partition(":")[0]]
    assert_inside(figure)


def test_pictures_are_written_in_the_format_of_their_name(tmp_path: Path) -> None:
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    for suffix, start in starts.items():
        path = tmp_path / f"ranks.{suffix}"
        code, _, err = run("show", "tp=2", "--picture", str(path))
        assert (code, str(path) in err) == (0, True)
        assert path.read_bytes().startswith(start)
    again = tmp_path / "again.svg"
    run("show", "tp=2", "--svg", str(again))
    assert again.read_bytes() == (tmp_path / "ranks.svg").read_bytes()
    ids = {element.get("id") for element in ElementTree.parse(again).iter()}
    assert {"rank 0", "rank 1", "node 0"} <= ids
    code, _, err = run("show", "tp=2", "--picture", str(tmp_path / "ranks.bmpx"))
    assert (code, "cannot write" in err) == (2, True)


def test_a_plan_without_a_configuration_is_drawn_as_such(tmp_path: Path) -> None:
    found = plan(
        MODELS["gpt-22b"],
        Cluster(world_size=7919, accelerator="H100"),
        TrainSpec(seq_len=8191, global_batch=3),
    )
    assert "no configuration keeps all rules" in texts(draw_plan(found))


def test_a_plan_in_which_nothing_fits_says_so_and_calls_none_the_fastest() -> None:
    train = TrainSpec(seq_len=4096, global_batch=8)
    found = plan(MODELS["llama3-405b"], Cluster(world_size=8, accelerator="H100"), train)
    figure = draw_plan(found)
    assert any(text.startswith("nothing fits; the nearest misses") for text in texts(figure))
    assert not any("1.00x" in text for text in texts(figure))


def test_a_legend_is_read_row_by_row_in_the_order_of_the_bars(planned: Plan) -> None:
    figure = draw_plan(planned)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    extent(figure, legend)
    places = {
        text.get_text(): (-round(text.get_window_extent().y0), text.get_window_extent().x0)
        for text in legend.get_texts()
    }
    order = [name for name in TIME_COLOURS if name in places]
    assert sorted(places, key=places.__getitem__) == order
