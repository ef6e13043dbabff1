"""Pipeline schedules are records: nothing else knows them by name."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from hp_mesh import ParallelDims, ParallelDimsError, planner
from hp_mesh.planner import MODELS, Candidate, Cluster, TrainSpec, estimate
from hp_mesh.planner._schedules import ADJUSTABLE, DEFAULT_SCHEDULE, SCHEDULES, ScheduleName

FOLDER = Path(str(planner.__file__)).parent
TRAIN = TrainSpec(seq_len=2048, global_batch=64, micro_batch=1, recompute="full")
# The names may be types, defaults and keys of published runs, but no module may compare them.
COMPARING = (ast.Compare, ast.Match, ast.IfExp)


def cost(schedule: ScheduleName, pp: int) -> Candidate:
    cluster = Cluster(world_size=8, accelerator="H100")
    train = replace(TRAIN, schedule=schedule)
    return estimate(MODELS["llama3-8b"], cluster, train, ParallelDims(pp=pp, world_size=8))


def test_every_name_has_one_record() -> None:
    assert tuple(SCHEDULES) == get_args(ScheduleName)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_no_module_compares_the_names_of_schedules(path: Path) -> None:
    compared = [
        constant.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, COMPARING)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant)
    ]
    assert not {*compared} & {*SCHEDULES}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_without_pipeline_stages_every_schedule_costs_the_same(schedule: ScheduleName) -> None:
    plain, own = cost("1f1b", 1), cost(schedule, 1)
    assert own == plain


@pytest.mark.parametrize("schedule", [*ADJUSTABLE, "any"])
@pytest.mark.parametrize("stages", [1, 4, 400])
def test_one_pipeline_rank_has_one_stage(schedule: ScheduleName, stages: int) -> None:
    train = replace(TRAIN, schedule=schedule, virtual_stages=stages)
    cluster = Cluster(world_size=8, accelerator="H100")
    own = estimate(MODELS["llama3-8b"], cluster, train, ParallelDims(pp=1, world_size=8))
    assert own.setting == (DEFAULT_SCHEDULE, 1, None)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_record_decides_bubble_memory_and_legal_stages(schedule: ScheduleName) -> None:
    record, own = SCHEDULES[schedule], cost(schedule, 4)
    assert own.schedule == schedule
    assert (own.virtual_stages > 1) == record.adjustable
    plain = cost("1f1b", 4)
    assert own.time.bubble <= plain.time.bubble
    assert (own.memory.parameters > plain.memory.parameters) == (record.weight_copies > 1)
    assert record.source.count("arXiv") >= 1
    if record.violations is not None:
        odd = replace(TRAIN, schedule=schedule, global_batch=6)
        cluster = Cluster(world_size=8, accelerator="H100")
        with pytest.raises(ParallelDimsError, match="microbatches=3"):
            estimate(MODELS["llama3-8b"], cluster, odd, ParallelDims(pp=4, dp_shard=2))
