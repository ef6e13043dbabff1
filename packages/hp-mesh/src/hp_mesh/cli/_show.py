"""The command that shows which rank sits where."""

from argparse import ArgumentParser, Namespace
from functools import partial

from ._blocks import Answer, Cell, Line, Table, cells
from ._command import Command, add_degrees, add_picture
from ._degrees import read_dims
from ._documents import dims_document
from ._elide import ends, rank_list
from ._nodes import check_nodes, choose_nodes
from ._numbers import read_count
from ._problems import Problems
from ._rank_map import RankMap, map_ranks
from ._rank_picture import draw_ranks

MOST_ROWS = 24
ROW = 8
LINKS = {
    True: Cell(text="between nodes", tone="warn"),
    False: Cell(text="inside a node"),
    None: Cell(text="not known", tone="dim"),
}


def answer_show(args: Namespace) -> Answer:
    """Return the axes with their groups, and every rank with its coordinates."""
    problems = Problems()
    with problems.noted():
        dims = read_dims(args.words, args.config, args.world)
    with problems.noted():
        ranks_per_node = read_count("--ranks-per-node", args.ranks_per_node)
    problems.raise_all()
    with problems.noted():
        topology = choose_nodes(dims.layout().world_size, ranks_per_node)
        check_nodes(dims.layout(), topology)
        found = map_ranks(dims, topology.ranks_per_node if topology else None, args.axis)
    problems.raise_all()
    return Answer(
        document=partial(_document, found),
        blocks=(
            Line(text=found.dims.summary(), tone="title"),
            Line(text=found.place),
            _axes_table(found),
            *_rank_blocks(found),
        ),
        draw=partial(draw_ranks, found),
    )


def _axes_table(found: RankMap) -> Table:
    rows = []
    for names in found.families():
        group = found.layout.group(names[0], 0)
        links = LINKS[found.crosses_nodes(names[0])]
        texts = (" ".join(names), len(group), found.world // len(group))
        rows.append(cells(*texts, links, rank_list(group)))
    return Table(
        title="",
        columns=("axes", "size", "groups", "links", "first group"),
        rows=tuple(rows or [cells("all", 1, 1, "inside a node", "0")]),
        right=frozenset({"size", "groups"}),
    )


def _rank_blocks(found: RankMap) -> tuple[Table | Line, ...]:
    """Return one row for each node, or several for a wide one, and what was left out."""
    width = min(found.width, ROW, found.world)
    starts = [
        (node, start) for node in range(found.nodes) for start in found.ranks_of(node)[::width]
    ]
    head, tail = ends(len(starts), MOST_ROWS)
    rows = [_row(found, *starts[i], width) for i in head]
    blocks: list[Table | Line] = []
    if tail:
        first, last = starts[len(head)][1], starts[tail[0]][1] - 1
        rows.append(cells("...", *[""] * width))
        blocks.append(
            Line(text=f"ranks {first}-{last} are left out here; --json has all", tone="warn")
        )
    rows += [_row(found, *starts[i], width) for i in tail]
    parts = ["rank", *([".".join(found.axes)] if found.axes else []), f"#{found.axis} group"]
    title = f"each cell: {', '.join(parts)}"
    table = Table(title=title, columns=("node", *(f"+{i}" for i in range(width))), rows=tuple(rows))
    return table, *blocks


def _row(found: RankMap, node: int, start: int, width: int) -> tuple[Cell, ...]:
    ranks = [rank for rank in range(start, start + width) if rank in found.ranks_of(node)]
    drawn = [Cell(text=_rank_text(found, r), group=found.group_of[r]) for r in ranks]
    label = "-" if found.ranks_per_node is None else node
    return cells(label, *drawn, *[""] * (width - len(drawn)))


def _rank_text(found: RankMap, rank: int) -> str:
    place = ".".join(map(str, found.coordinates(rank).values()))
    return " ".join(word for word in (str(rank), place, f"#{found.group_of[rank]}") if word)


def _document(found: RankMap) -> dict[str, object]:
    layout = found.layout
    return {
        "dims": dims_document(found.dims),
        "ranks_per_node": found.ranks_per_node,
        "axes": {
            name: {"size": layout.size(name), "crosses_nodes": found.crosses_nodes(name)}
            for name in layout.names
        },
        "ranks": [
            {
                "rank": rank,
                "node": found.ranks_per_node and rank // found.ranks_per_node,
                "coordinates": layout.coordinates(rank) | {"ep": layout.coordinate("ep", rank)},
            }
            for rank in range(found.world)
        ],
    }


def _add_options(parser: ArgumentParser) -> None:
    add_degrees(parser)
    parser.add_argument(
        "--axis", metavar="AXIS", help="colour the groups of this axis (default: the innermost)"
    )
    add_picture(parser)


SHOW = Command(
    name="show",
    summary="show which rank sits where",
    example="tp=8 pp=2 --world 64 --axis pp --svg ranks.svg",
    add_options=_add_options,
    answer=answer_show,
)
