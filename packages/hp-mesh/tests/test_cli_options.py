"""Each described field of `TrainSpec` and `Cluster` is an option of ``plan`` and ``estimate``."""

from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from hp_mesh.cli import _plans
from hp_mesh.planner import MODELS, Cluster, ModelShape, Plan, TrainSpec, plan

from .test_cli import run

RUN = ["--model", "mixtral-8x7b", "--gpus", "8", "--seq-len", "512", "--global-batch", "8"]
NEEDED = {
    "recompute_layers": ["--recompute", "full"],
    "virtual_stages": ["--schedule", "interleaved"],
}
DESCRIBED = [
    (spec, each) for spec in (Cluster, TrainSpec) for each in fields(spec) if each.metadata
]


def texts(field: Field[Any]) -> list[tuple[list[str], object]]:
    """Give values of a field as arguments of its option, and as Python values."""
    option = "--" + field.name.replace("_", "-")
    if field.default is False:
        return [([option], True)]
    choices = field.metadata["choices"]
    if choices:
        return [([option, str(value).lower()], value) for value in choices]
    value = 0.5 if field.name == "memory_fraction" else 2
    return [([option, str(value)], value)]


@pytest.mark.parametrize("command", ["plan", "estimate"])
@pytest.mark.parametrize(("spec", "field"), DESCRIBED, ids=lambda value: getattr(value, "name", ""))
def test_every_described_field_is_an_option_with_all_its_values(
    command: str, spec: type, field: Field[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def record(model: ModelShape, cluster: Cluster, train: TrainSpec, **_: object) -> Plan:
        given.append(getattr(cluster if spec is Cluster else train, field.name))
        return small

    small = plan(
        MODELS["llama3-8b"],
        Cluster(world_size=8, accelerator="H100"),
        TrainSpec(seq_len=512, global_batch=8),
    )
    monkeypatch.setattr(_plans, "plan", record)
    monkeypatch.setattr(_plans, "estimate", lambda *_: small.best)
    for argv, value in texts(field):
        words = [] if field.default is MISSING else NEEDED.get(field.name, [])
        code, _, err = run(command, *RUN, *words, *argv, "--json")
        assert (code, err) == (0, "")
        assert given[-1] == value
        assert isinstance(given[-1], bool) == isinstance(value, bool)


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_help_describes_every_option_with_its_default(command: str) -> None:
    _, out, _ = run(command, "--help")
    words = " ".join(out.split())
    for _, field in DESCRIBED:
        assert "--" + field.name.replace("_", "-") in words
        assert field.metadata["help"].split("(")[0] in words
        if field.default not in (None, False, MISSING):
            assert f"(default: {str(field.default).lower()})" in words
