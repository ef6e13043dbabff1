"""The command that says what to run."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial

from .._dims import ParallelDims
from ..planner import ACCELERATORS, Cluster, ModelShape, TrainSpec, plan
from ._blocks import Answer
from ._command import Command, add_model, add_picture, add_world
from ._models import read_shape
from ._nodes import NODE, check_nodes, choose_nodes
from ._numbers import MOST_RANKS, read_count
from ._plan_blocks import plan_blocks
from ._plan_document import plan_document
from ._plan_picture import draw_plan
from ._problems import Problems
from ._rejections import group_rejections

COUNTS = ("ranks_per_node", "seq_len", "global_batch", "micro_batch", "top")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to plan for, and how many candidates to tell of."""

    model: ModelShape
    cluster: Cluster
    train: TrainSpec
    top: int


def read_run(args: Namespace) -> Run:
    """Return what the command line describes; raises one error with all that is wrong with it."""
    problems = Problems()
    counts: dict[str, int | None] = {}
    with problems.noted():
        counts["world"] = read_count("--gpus/--world", args.world, MOST_RANKS)
    for name in COUNTS:
        with problems.noted():
            counts[name] = read_count(f"--{name.replace('_', '-')}", getattr(args, name))
    with problems.noted():
        model = read_shape(args.model)
    with problems.noted():
        world, node = counts.get("world"), counts.get("ranks_per_node")
        if world is not None and node is not None:
            layout = ParallelDims(world_size=world).layout()
            check_nodes(layout, choose_nodes(world, node))
    # A count that is none has been noted; 1 in its place lets the other values be judged.
    with problems.noted():
        cluster = Cluster(
            world_size=counts.get("world") or 1,
            accelerator=args.gpu,
            ranks_per_node=counts.get("ranks_per_node") or NODE,
        )
    with problems.noted():
        train = TrainSpec(
            seq_len=counts.get("seq_len") or 1,
            global_batch=counts.get("global_batch") or 1,
            micro_batch=counts.get("micro_batch"),
            recompute=args.recompute,
            float8=args.float8,
        )
    problems.raise_all()
    return Run(model=model, cluster=cluster, train=train, top=counts["top"] or 1)


def answer_plan(args: Namespace) -> Answer:
    """Return the configuration to run, the next ones and why they lose, and what was rejected."""
    run = read_run(args)
    found = plan(run.model, run.cluster, run.train)
    rejections = group_rejections(found.rejected)
    return Answer(
        document=partial(plan_document, found, found.candidates[: run.top], rejections),
        blocks=plan_blocks(found, rejections, run.top),
        draw=partial(draw_plan, found),
        exit_code=1 if found.best is None or found.best.fit == "does not fit" else 0,
    )


def _add_options(parser: ArgumentParser) -> None:
    add_model(parser, required=True)
    add_world(parser)
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        default="H100",
        help=f"{', '.join(ACCELERATORS)} (default: H100)",
    )
    parser.add_argument("--micro-batch", metavar="N", help="sequences at once (default: the best)")
    parser.add_argument(
        "--recompute",
        metavar="HOW",
        help="what the backward computes again: none, selective (the attention core), selective-op "
        "(all but attention outputs and every second matrix product) or full (whole layers) "
        "(default: the best)",
    )
    parser.add_argument("--float8", action="store_true", help="multiply linear layers in fp8")
    parser.add_argument(
        "--top",
        metavar="N",
        default="10",
        help="candidates to tell of; only --json tells of all splits of dp apart (default: 10)",
    )
    add_picture(parser)


NOTES = """words of the answer:
  buffers     memory of gathered parameters, gradients on their way and tokens sent to experts
  exposed tp  communication over tp that computing does not hide; so for the other axes
  bubble      time that a pipeline rank waits for others
  borderline  above the memory limit by at most 15%, which is the estimate's own error"""

PLAN = Command(
    name="plan",
    summary="say what to run: every valid configuration, the fastest that fits first",
    example="--model llama3-405b --gpus 2048 --gpu h100 --seq-len 8192 --global-batch 2048",
    add_options=_add_options,
    answer=answer_plan,
    notes=NOTES,
)
