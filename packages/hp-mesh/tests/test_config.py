"""Degrees from mappings, objects and command lines, and back."""

import copy
import json
import pickle
import re
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, make_dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims, ParallelDimsError

from .strategies import dims, fields, orders, world_of


@given(dims())
@settings(deadline=None, max_examples=100)
def test_dictionaries_round_trip_through_json(dims: ParallelDims) -> None:
    assert ParallelDims.from_dict(json.loads(json.dumps(dims.to_dict()))) == dims


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=-1, cp=2), ParallelDims(ep=3)])
def test_unresolved_degrees_round_trip_too(dims: ParallelDims) -> None:
    assert ParallelDims.from_dict(dims.to_dict()) == dims


@given(fields(), orders)
@settings(deadline=None, max_examples=100)
def test_command_lines_round_trip(degrees: dict[str, Any], order: tuple[str, ...]) -> None:
    words = [f"--order={','.join(order)}"]
    degrees |= {n: str(degrees[n]).lower() for n in ("fsdp_folds_cp", "free_etp")}
    for name, degree in degrees.items():
        if degree is not None:
            words += [f"--{name.replace('_', '-')}", str(degree)]
    parser = ArgumentParser()
    ParallelDims.add_arguments(parser)
    world = world_of(degrees)
    expected = ParallelDims(**degrees, order=order, world_size=world)
    assert ParallelDims.from_args(parser.parse_args(words), world) == expected
    assert ParallelDims.from_args(parser.parse_args(words)).resolve(world) == expected


def test_an_empty_command_line_means_the_defaults() -> None:
    parser = ArgumentParser()
    ParallelDims.add_arguments(parser)
    assert ParallelDims.from_args(parser.parse_args([])) == ParallelDims()


def test_bad_numbers_on_a_command_line_get_the_same_error_as_elsewhere() -> None:
    parser = ArgumentParser()
    ParallelDims.add_arguments(parser)
    for text in ("0", "two", "2.0"):
        with pytest.raises(ParallelDimsError) as caught:
            ParallelDims.from_args(parser.parse_args(["--dp-shard", text]))
        assert str(caught.value) == (
            f"dp_shard='{text}' is not a degree; use a positive integer, -1 (inferred) or None"
        )


@given(fields(), orders)
@settings(deadline=None, max_examples=100)
def test_mappings_objects_and_dataclasses_give_the_same_degrees(
    degrees: dict[str, Any], order: tuple[str, ...]
) -> None:
    world = world_of(degrees)
    content = {**degrees, "order": order, "learning_rate": 0.1}
    record = make_dataclass("Record", list(content))(**content)
    expected = ParallelDims(**degrees, order=order, world_size=world)
    for config in (content, SimpleNamespace(**content), record):
        assert ParallelDims.from_config(config, world) == expected


@given(dims(), st.sampled_from([None, "mesh", "run.mesh"]))
@settings(deadline=None, max_examples=60)
def test_toml_and_yaml_files_round_trip_from_any_table(
    dims: ParallelDims, table: str | None
) -> None:
    fields = {name: value for name, value in dims.to_dict().items() if value is not None}
    # What TOML writes on one line each, and YAML as a flow mapping, JSON writes alike.
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    nested: dict[str, Any] = fields
    for name in reversed(table.split(".") if table else []):
        nested = {name: nested}
    with TemporaryDirectory() as folder:
        toml, document = Path(folder, "a.toml"), Path(folder, "a.yaml")
        toml.write_text("\n".join([f"[{table}]" if table else "", *lines]))
        document.write_text(yaml.safe_dump(nested))
        assert ParallelDims.from_toml(toml, table) == dims
        assert ParallelDims.from_yaml(str(document), table) == dims


def test_a_file_whose_table_or_keys_are_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("tp = 2\nsteps = 4\n[run]\ntp = 2\n")
    with pytest.raises(ParallelDimsError, match=r"'steps' is not a field.*\n'run' is not a field"):
        ParallelDims.from_toml(file)
    with pytest.raises(ParallelDimsError, match=r"run.toml has no 'mesh'; use tp, steps or run"):
        ParallelDims.from_toml(file, "mesh")
    with pytest.raises(ParallelDimsError, match=r"run.toml:run has no 'mesh'; use tp"):
        ParallelDims.from_toml(file, "run.mesh")
    with pytest.raises(ParallelDimsError, match=r"run.toml:tp holds int and not named fields"):
        ParallelDims.from_toml(file, "tp")
    assert ParallelDims.from_toml(file, "run") == ParallelDims(tp=2)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert ParallelDims.from_yaml(empty) == ParallelDims()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", b"tp = = 2"),
        ("a.toml", b"tp = '\xff'"),
        ("a.toml", b"a = " + b"[" * 5000 + b"]" * 5000),
        ("a.yaml", b"tp: [1"),
        ("a.yaml", b"\xff\xfe\xff"),
        ("folder", None),
        ("absent.toml", None),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    read = ParallelDims.from_yaml if name.endswith("yaml") else ParallelDims.from_toml
    message = f"^cannot read {re.escape(str(path))}: .+"
    with pytest.raises(ParallelDimsError, match=message) as error:
        read(path)
    assert error.value.violations[0].rule == "file"


@pytest.mark.parametrize(
    "args",
    [
        None,
        "x",
        ["tp"],
        Namespace(steps=3),
        Namespace(tensor_model_parallel_size=4),
        Namespace(tp=None, tensor_model_parallel_size=4),
        Namespace(dp=4, tp="2"),
    ],
)
def test_options_of_another_command_line_are_refused(args: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"^args.*from_config$"):
        ParallelDims.from_args(args, 16)


def test_a_configuration_without_a_world_says_what_to_pass() -> None:
    with pytest.raises(ParallelDimsError, match="pass world_size to from_config"):
        ParallelDims.from_config({"tp": 2})


def test_without_pyyaml_yaml_files_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        ParallelDims.from_yaml(tmp_path / "any.yaml")


@pytest.mark.parametrize("value", ["no", 1, None, "0"])
def test_a_switch_is_true_or_false_and_nothing_else(value: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"fsdp_folds_cp=.* is neither true nor false"):
        ParallelDims(fsdp_folds_cp=value)
    assert not ParallelDims(fsdp_folds_cp="False").fsdp_folds_cp  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [5, None, ["pp", ["tp"]], {"pp": 1, 2: 3}])
def test_an_order_that_is_no_list_of_names_is_refused(order: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"order=.* is not a list of axis names; use"):
        ParallelDims(order=order)


def test_a_mode_that_is_none_names_those_there_are() -> None:
    with pytest.raises(
        ParallelDimsError, match=r"ep_mode='flat' is not a mode; use folded or peer"
    ):
        ParallelDims(ep_mode="flat")  # type: ignore[arg-type]


def test_absent_and_none_mean_default_but_etp_follows_tp() -> None:
    expected = ParallelDims(tp=2, etp=2, ep=2, world_size=8)
    assert ParallelDims.from_config({"tp": 2, "ep": 2, "cp": None}, 8) == expected
    assert ParallelDims.from_config({"tp": -1, "dp_shard": 4, "ep": 2}, 8) == expected
    assert ParallelDims.from_config({"tp": 2, "ep": 2, "etp": 1}, 8).etp == 1


def test_experts_are_judged_with_the_tp_that_cuts_them() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"tp": 4, "ep": 16}, 8)
    assert str(caught.value) == (
        "ep=16*etp=4=64 does not divide dp_shard*cp*tp=8 (dp_shard=2, cp=1, tp=4); use ep=1 or 2"
    )
    for ep in caught.value.violations[0].legal["ep"]:
        assert ParallelDims.from_config({"tp": 4, "ep": ep}, 8).etp == 4


@pytest.mark.parametrize("config", [None, "tp=4", b"tp", 5, 2.5, True, [], [("tp", 4)], (), {"tp"}])
def test_what_can_have_no_names_is_no_configuration(config: Any) -> None:
    with pytest.raises(ParallelDimsError, match=r"^config=.* use a mapping or an object with attr"):
        ParallelDims.from_config(config, 8)
    with pytest.raises(ParallelDimsError, match=r"^mapping=.* use a mapping such as to_dict"):
        ParallelDims.from_dict(config)


def test_a_tuple_whose_items_have_names_is_a_configuration() -> None:
    class Run(NamedTuple):
        tp: int
        cp: int

    assert ParallelDims.from_config(Run(tp=2, cp=2), 8).dp_shard == 2


def test_a_configuration_needs_a_world() -> None:
    with pytest.raises(ParallelDimsError, match=r"^world_size=None is not .* a positive integer$"):
        ParallelDims.from_config({}, None)


@pytest.mark.parametrize(
    ("dp", "shard"), [("2", 2), (2, "2"), (np.int64(2), 2), ("-1", -1), (" 2", "2")]
)
def test_one_degree_spelled_in_two_ways_does_not_differ(dp: object, shard: object) -> None:
    assert ParallelDims.from_config({"dp": dp, "dp_shard": shard, "tp": 2}, 4).dp_shard == 2


def test_an_older_name_with_a_wrong_value_is_named_as_it_was_given() -> None:
    with pytest.raises(ParallelDimsError, match=r"^dp='x' is not a degree"):
        ParallelDims.from_config({"dp": "x"}, 4)


def test_dp_is_an_older_name_of_dp_shard() -> None:
    assert ParallelDims.from_config({"dp": 4, "tp": 2}, 8).dp_shard == 4
    assert ParallelDims.from_config({"dp": 4, "dp_shard": 4, "tp": 2}, 8).dp_shard == 4
    with pytest.raises(ParallelDimsError, match="dp=2 and dp_shard=4 differ"):
        ParallelDims.from_config({"dp": 2, "dp_shard": 4, "tp": 2}, 8)


def test_unknown_keys_of_a_dictionary_are_all_reported() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_dict({"tp": 2, "tensor": 2, "pipe": 1})
    assert [list(v.values) for v in caught.value.violations] == [["tensor"], ["pipe"]]
    assert "dp_replicate" in str(caught.value)


def test_all_that_is_wrong_in_a_configuration_is_reported_at_once() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_dict({"tensor": 2, "tp": 0, "cp": 2, "ulysses_degree": 3})
    assert [v.rule for v in caught.value.violations] == ["field", "value", "ulysses"]
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"dp": 2, "dp_shard": 4, "order": 5}, None)
    assert [v.rule for v in caught.value.violations] == ["dp", "value", "order"]


def test_a_summary_says_that_etp_was_taken_from_tp() -> None:
    taken = ParallelDims.from_config({"tp": 2, "ep": 2}, 8)
    given = ParallelDims.from_config({"tp": 2, "ep": 2, "etp": 2}, 8)
    words = "pp=1 dp_replicate=1 dp_shard=4 cp=1 tp=2 ep=2 etp=2"
    assert taken.summary() == f"{words} (from tp) world=8"
    assert given.summary() == ParallelDims(tp=2, ep=2, etp=2, world_size=8).summary()
    assert given.summary() == f"{words} world=8"
    # Nothing was taken where there is nothing to take, and how it came about is no other degree.
    assert ParallelDims.from_config({"ep": 2}, 8).summary().endswith("tp=1 ep=2 etp=1 world=8")
    assert (taken == given, hash(taken), repr(taken)) == (True, hash(given), repr(given))
    assert taken.to_dict() == given.to_dict()
    assert ParallelDims(**asdict(taken)) == taken
    assert taken.resolve(8).summary() == copy.copy(taken).summary() == taken.summary()
    assert pickle.loads(pickle.dumps(taken)).summary() == taken.summary()
    assert replace(taken, etp=1).summary().endswith("tp=2 ep=2 etp=1 world=8")
    assert replace(taken, etp=2).summary() == given.summary()


TORCHTITAN = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
    "expert_tensor_parallel_degree": "etp",
}
MEGATRON = {
    "data_parallel_size": "dp_shard",
    "context_parallel_size": "cp",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
ACCELERATE = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "cp_size": "cp",
    "tp_size": "tp",
}
DEEPSPEED = {"tensor_parallel.autotp_size": "tp", "ep_size": "ep"}


@pytest.mark.parametrize("names", [TORCHTITAN, MEGATRON, ACCELERATE], ids=len)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_names_of_frameworks_give_their_degrees(names: dict[str, str], kind: Any) -> None:
    degrees: dict[str, Any] = {
        "dp_replicate": 2,
        "dp_shard": 3,
        "cp": 2,
        "tp": 2,
        "pp": 2,
        "ep": 3,
        "etp": 2,
    }
    fields = {*names.values()}
    expected = ParallelDims(
        **{name: degrees[name] for name in fields}, world_size=prod_of(degrees, fields)
    )
    config = kind(**{name: degrees[field] for name, field in names.items()}, steps=10)
    assert ParallelDims.from_config(config, expected.layout().world_size) == expected
    for name, field in names.items():
        world = 2 if field == "dp_shard" else 8
        found = ParallelDims.from_config(kind(**{name: 2, "free_etp": True}), world)
        assert getattr(found, field) == 2
        with pytest.raises(ParallelDimsError, match=f"^{name}='x' is not a degree"):
            ParallelDims.from_config(kind(**{name: "x"}), 8)


def prod_of(degrees: dict[str, int], names: set[str]) -> int:
    return prod(degrees[name] for name in names - {"ep", "etp"})


def test_deepspeed_s_nested_names_are_read_and_zero_is_off() -> None:
    config = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 4}}
    assert ParallelDims.from_config(config, 8) == ParallelDims(tp=4, world_size=8)
    config["tensor_parallel"]["autotp_size"] = 0
    assert ParallelDims.from_config(config, 8) == ParallelDims(world_size=8)
    with pytest.raises(ParallelDimsError, match="has none of the names"):
        ParallelDims.from_config({"tensor_parallel": {"tp_grain_size": 4}}, 8)


@pytest.mark.parametrize("name", ["sp_size", "sequence_parallel_size"])
def test_ranks_that_exchange_heads_of_a_sequence_are_ulysses_ranks_of_cp(name: str) -> None:
    expected = ParallelDims(cp=4, ulysses_degree=4, world_size=8)
    assert ParallelDims.from_config({name: 4}, 8) == expected
    assert ParallelDims.from_config({name: 4, "cp_size": 1}, 8) == expected
    both = ParallelDims.from_config({name: 2, "cp_size": 2}, 8)
    assert both == ParallelDims(cp=4, ulysses_degree=2, world_size=8)
    assert ParallelDims.from_config({name: 1, "cp_size": 2}, 8) == ParallelDims(cp=2, world_size=8)
    with pytest.raises(ParallelDimsError, match=r"^(sp_size|sequence).*=0 is not a degree"):
        ParallelDims.from_config({"sp_size": 0}, 8)


def test_an_absent_etp_is_what_it_is_in_the_framework_of_the_names() -> None:
    titan = {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}
    megatron = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
    expected = ParallelDims(tp=2, ep=4, world_size=8)
    assert ParallelDims.from_config(titan, 8) == expected
    assert "(from tp)" not in ParallelDims.from_config(titan, 8).summary()
    assert ParallelDims.from_config({**megatron, "expert_tensor_parallel_size": 1}, 8) == expected
    for unset in ({}, {"expert_tensor_parallel_size": None}):
        assert ParallelDims.from_config({**megatron, **unset}, 8) == replace(expected, etp=2)


class AccelerateConfig:
    """What an accelerate configuration looks like: degrees, and properties made of them."""

    dp_replicate_size, dp_shard_size, cp_size, tp_size = 2, 2, 1, 2
    cp_handler = device_mesh = None

    @property
    def data_parallel_size(self) -> int:
        """Return the replicas times the ranks that shard."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Return the ranks that get the same batch."""
        return self.tp_size * self.cp_size


def test_data_parallel_ranks_are_replicas_times_those_that_shard() -> None:
    expected = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    assert ParallelDims.from_config(AccelerateConfig(), 8) == expected
    megatron = {"data_parallel_size": 4, "tensor_model_parallel_size": 2}
    assert ParallelDims.from_config(megatron, 8).dp_shard == 4
    assert ParallelDims.from_config({**megatron, "dp_replicate": 2}, 8).dp_shard == 2
    message = r"^data_parallel_size=4 is not dp_replicate\*dp_shard=2\*4; leave it out"
    with pytest.raises(ParallelDimsError, match=message):
        ParallelDims.from_config({**megatron, "dp_replicate": 2, "dp_shard": 4}, 16)
    with pytest.raises(
        ParallelDimsError, match=r"^data_parallel_size=4 is no multiple of dp_replicate=3;"
    ):
        ParallelDims.from_config({**megatron, "dp_replicate": 3}, 24)


def test_a_run_for_eight_ranks_keeps_all_its_degrees() -> None:
    config = {
        "data_parallel_replicate_degree": 2,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 2,
    }
    expected = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, ep=2, world_size=8)
    assert ParallelDims.from_config(config, 8) == expected


def test_a_degree_that_two_names_give_differently_is_refused() -> None:
    same = {"tp": 2, "tensor_parallel_degree": "2"}
    assert ParallelDims.from_config(same, 8).tp == 2
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"tp_size": 2, "tensor_model_parallel_size": 4}, 8)
    reason = "tensor_model_parallel_size=4 and tp_size=2 differ, but all of them set tp"
    assert str(caught.value) == f"{reason}; give one of them"


NAMES = (
    "dp_replicate, dp_shard, cp, tp, pp, ep, etp, ulysses_degree, ep_mode, order, fsdp_folds_cp, "
    "free_etp or dp"
)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (
            SimpleNamespace(data_parallel_shards=2, tensor_parallelism=4),
            "it has data_parallel_shards and tensor_parallelism",
        ),
        ({1: 2}, "it has 1"),
        ({f"option_{i}": i for i in range(40)}, "it has option_0, option_1, option_2, "),
        (object(), "it has no fields"),
    ],
    ids=["others", "no text", "many", "none"],
)
def test_a_configuration_with_none_of_the_names_is_refused_with_all_of_them(
    config: object, given: str
) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config(config, 8)
    (violation,) = caught.value.violations
    assert violation.rule == "fields"
    name = type(config).__name__
    assert str(violation).startswith(f"config of type {name} has none of the names {NAMES}; ")
    assert given in str(violation)
    for names in (TORCHTITAN, MEGATRON, ACCELERATE, DEEPSPEED):
        assert all(name.split(".")[0] in str(violation) for name in names)
    assert len(str(violation)) < 1000


@pytest.mark.parametrize("config", [{}, SimpleNamespace(cp=None), {"dp": None}, {"etp": 1}])
def test_a_configuration_that_is_empty_or_has_one_of_the_names_is_none_the_worse(
    config: object,
) -> None:
    assert ParallelDims.from_config(config, 8) == ParallelDims(world_size=8)


def test_a_model_whose_attributes_are_computed_may_be_a_configuration() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> int:
            if name == "tp":
                return 2
            raise AttributeError(name)

    assert ParallelDims.from_config(Lazy(), 8).tp == 2


@pytest.mark.parametrize(
    "config", [{"tp": 2, "world_size": 16}, SimpleNamespace(world_size="16", tp=2)]
)
def test_a_configuration_for_another_world_is_refused(config: object) -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config(config, 8)
    (violation,) = caught.value.violations
    assert violation.rule == "world"
    assert violation.values == {"world_size": 8, "configured": 16}
    assert str(violation).startswith("world_size=8 is not the world_size=16 of the configuration")
    assert ParallelDims.from_config(config, 16).dp_shard == 8
    with pytest.raises(ParallelDimsError, match="world_size='all' is not a degree"):
        ParallelDims.from_config({"tp": 2, "world_size": "all"}, 8)


@pytest.mark.parametrize(
    ("given", "world", "replicate", "shard"),
    [
        ({"data_parallel_size": 4, "dp_shard": -1, "tp": 2}, 8, 1, 4),
        ({"data_parallel_size": 4, "dp_replicate": 2, "dp_shard": -1}, 4, 2, 2),
        ({"data_parallel_size": 4, "dp_replicate": -1}, 4, 4, 1),
        ({"data_parallel_size": 4, "dp_replicate": -1, "dp_shard": 2}, 4, 2, 2),
        ({"data_parallel_size": -1, "dp_replicate": 2}, 8, 2, 4),
    ],
)
def test_what_is_left_open_of_the_data_parallel_ranks_follows_from_their_number(
    given: dict[str, Any], world: int, replicate: int, shard: int
) -> None:
    dims = ParallelDims.from_config(given, world)
    assert (dims.dp_replicate, dims.dp_shard) == (replicate, shard)


@pytest.mark.parametrize("open_", ["dp_shard", "dp_replicate"])
def test_data_parallel_ranks_that_are_not_those_of_the_world_are_an_error(open_: str) -> None:
    with pytest.raises(ParallelDimsError, match="is not world_size=8"):
        ParallelDims.from_config({"data_parallel_size": 4, open_: -1}, 8)


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_a_file_of_megatron_resolved_later_splits_experts_like_layers(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"run.{suffix}"
    sign = "=" if suffix == "toml" else ":"
    path.write_text(f"tensor_model_parallel_size{sign} 4\n")
    read = ParallelDims.from_toml if suffix == "toml" else ParallelDims.from_yaml
    assert read(path).resolve(8) == read(path, world_size=8)
    assert read(path).resolve(8).etp == 4
    path.write_text(f"tensor_model_parallel_size{sign} -1\ndp{sign} 2\n")
    assert read(path).resolve(8) == read(path, world_size=8)
    assert read(path).resolve(8).etp == 4


def test_degrees_nested_in_objects_are_read_like_those_in_mappings() -> None:
    nested = SimpleNamespace(ep_size=1, tensor_parallel=SimpleNamespace(autotp_size=4))
    mapping = {"ep_size": 1, "tensor_parallel": {"autotp_size": 4}}
    assert ParallelDims.from_config(nested, 8) == ParallelDims.from_config(mapping, 8)
    assert ParallelDims.from_config(nested, 8).tp == 4


@pytest.mark.parametrize("spelled", [list, tuple, ",".join])
def test_one_order_in_two_fields_is_no_conflict(spelled: Any) -> None:
    config = {"use_tp_pp_dp_mapping": True, "tp": 2}
    order = ParallelDims.from_config(config, 8).order
    assert ParallelDims.from_config({**config, "order": spelled(order)}, 8).order == order


def test_sp_size_and_another_ulysses_degree_are_a_conflict() -> None:
    config = {"sp_size": 2, "cp_size": 4}
    assert ParallelDims.from_config(config, 8).ulysses_degree == 2
    assert ParallelDims.from_config({**config, "ulysses_degree": 2}, 8).cp == 8
    with pytest.raises(ParallelDimsError, match="sp_size=2 and ulysses_degree=4 differ"):
        ParallelDims.from_config({**config, "ulysses_degree": 4}, 8)


def test_an_invalid_sp_size_is_named_and_other_errors_are_listed_too() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"sp_size": -1, "tp": "x"}, 8)
    text = str(caught.value)
    assert "sp_size=-1 is not a degree" in text
    assert "tp='x' is not a degree" in text


def test_a_file_of_megatron_describes_the_mesh_that_it_builds(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "tensor_model_parallel_size = 2\ndata_parallel_size = 4\nexpert_model_parallel_size = 2\n"
    )
    read, resolved = ParallelDims.from_toml(path), ParallelDims.from_toml(path, world_size=8)
    assert read.efsdp == resolved.efsdp == 2
    assert read.etp_enabled
    assert "etp=2 (from tp)" in read.summary()
    assert read.layout().group("efsdp", 0) == resolved.layout().group("efsdp", 0)
    for copied in (ParallelDims.from_dict(read.to_dict()), replace(read, order=read.order)):
        assert copied.resolve(8) == resolved
    path.write_text("tensor_model_parallel_size = -1\ndata_parallel_size = 4\n")
    read = ParallelDims.from_toml(path)
    assert "etp=-1 (from tp)" in read.summary()
    with pytest.raises(ParallelDimsError, match="tp is not known yet"):
        read.etp_enabled  # noqa: B018


def test_equal_degrees_are_no_conflict_if_one_of_them_is_text() -> None:
    read = ParallelDims.from_config({"sp_size": 4, "ulysses_degree": "4"}, 16)
    assert read == ParallelDims.from_config({"sp_size": "4", "ulysses_degree": 4}, 16)
    assert (read.cp, read.ulysses_degree) == (4, 4)


def test_two_ulysses_degrees_are_one_error() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"sp_size": 4, "ulysses_degree": "2"}, 16)
    (violation,) = caught.value.violations
    assert violation.reason.startswith("sp_size=4 and ulysses_degree=2 differ")
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims.from_config({"sp_size": 4, "ulysses_degree": "x"}, 16)
    (violation,) = caught.value.violations
    assert violation.reason.startswith("ulysses_degree='x' is not a degree")


def test_an_error_about_dp_shard_names_dp() -> None:
    with pytest.raises(ParallelDimsError, match=r"\(dp_shard is read from dp=3\)"):
        ParallelDims.from_config({"dp": 3}, 4)


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_a_file_with_too_many_levels_is_refused(tmp_path: Path, suffix: str) -> None:
    sign = "=" if suffix == "toml" else ":"
    path = tmp_path / f"run.{suffix}"
    path.write_text(f"tp{sign} {'[' * 2000}{']' * 2000}\n")
    read = ParallelDims.from_toml if suffix == "toml" else ParallelDims.from_yaml
    with pytest.raises(ValueError, match="nested in more than 64 levels"):
        read(path)
