"""The command that lists the groups of an axis."""

from argparse import ArgumentParser, Namespace

from ._blocks import Answer, Line, Table, cells
from ._command import Command, add_degrees
from ._degrees import read_dims
from ._documents import dims_document
from ._elide import ends, rank_list
from ._nodes import check_nodes, choose_nodes
from ._numbers import read_count, read_rank
from ._problems import Problems

MOST_GROUPS = 24


def answer_groups(args: Namespace) -> Answer:
    """Return all groups of an axis or alias, or the one that holds a rank."""
    problems = Problems()
    rank = None
    with problems.noted():
        dims = read_dims(args.words, args.config, args.world)
    with problems.noted():
        rank = read_rank("--rank", args.rank)
    with problems.noted():
        ranks_per_node = read_count("--ranks-per-node", args.ranks_per_node)
    problems.raise_all()
    layout = dims.layout()
    with problems.noted():
        size = layout.size(args.name)
    with problems.noted():
        place = None if rank is None else layout.coordinates(rank)
    topology = choose_nodes(layout.world_size, ranks_per_node)
    with problems.noted():
        check_nodes(layout, topology)
    problems.raise_all()
    crosses = topology and layout.crosses_nodes(args.name, topology.ranks_per_node)
    links = "" if topology is None else ", between nodes" if crosses else ", inside a node"
    document = {
        "dims": dims_document(dims),
        "axis": args.name,
        "size": size,
        "ranks_per_node": topology and topology.ranks_per_node,
        "crosses_nodes": crosses,
    }
    heading = Line(text=dims.summary(), tone="title")
    if rank is not None:
        group = layout.group(args.name, rank)
        at = " ".join(f"{axis}={index}" for axis, index in (place or {}).items())
        lines = (
            Line(text=f"rank {rank} is at {at}"),
            Line(text=f"its {args.name} group of {size}: {rank_list(group, 64)}"),
        )
        return Answer(
            document=lambda: {**document, "rank": rank, "group": list(group)},
            blocks=(heading, *lines),
        )
    groups = layout.groups(args.name)
    head, tail = ends(len(groups), MOST_GROUPS)
    rows = [cells(i, rank_list(groups[i])) for i in head]
    if tail:
        rows.append(cells("...", f"{tail[0] - len(head)} groups left out; --json has all"))
    rows += [cells(i, rank_list(groups[i])) for i in tail]
    plural = "s" * (len(groups) != 1)
    table = Table(
        title=f"{len(groups)} {args.name} group{plural} of {size}{links}",
        columns=("group", "ranks"),
        rows=tuple(rows),
        right=frozenset({"group"}),
    )
    return Answer(
        document=lambda: {**document, "groups": [list(group) for group in groups]},
        blocks=(heading, table),
    )


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="AXIS", help="an axis or alias: tp, fsdp, dp, ep, ...")
    add_degrees(parser)
    parser.add_argument("--rank", metavar="R", help="only the group that holds this rank")


GROUPS = Command(
    name="groups",
    summary="list the groups of an axis or alias",
    example="fsdp tp=8 cp=2 --world 64 --rank 5",
    add_options=_add_options,
    answer=answer_groups,
)
