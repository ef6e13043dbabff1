"""Wrong input: one message with everything that is wrong, exit code 2, no traceback."""

import json
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_mesh import ParallelDims

from .test_cli import document, run

TABLE = {"tp": 4, "dp_shard": -1, "world_size": 16}


def refused(*argv: str) -> str:
    """Give the message of a refused command."""
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert err.startswith("hp-mesh ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tp8"], "'tp8' is not NAME=VALUE"),
        (["tensor=8"], "'tensor' is not a field; use dp_replicate"),
        (["tp=2", "tp=4"], "tp is given twice"),
        (["tp="], "'tp=' is not NAME=VALUE"),
        (["tp=3", "--world", "4"], "tp=3 does not divide world_size=4; use 1, 2 or 4"),
        (["tp=0"], "tp=0 is not a degree"),
        (["tp=2.5"], "tp='2.5' is not a degree"),
        (["tp=-1", "dp_shard=-1", "--world", "4"], "only one degree can be inferred"),
        (["ep=3", "--world", "4"], "ep=3 does not divide dp_shard*cp*tp=4"),
        (["etp=2", "tp=4"], "etp=2 is neither 1 nor tp=4"),
        (["cp=4", "ulysses_degree=3"], "ulysses_degree=3 does not divide cp=4"),
        (["order=tp,pp"], "is not a permutation of"),
        (["ep_mode=mixed"], "ep_mode='mixed'"),
        (["fsdp_folds_cp=maybe"], "fsdp_folds_cp='maybe'"),
        (["ep=-1", "ep_mode=peer"], "ep=-1 follows from the world; give --world N"),
        (["dp_shard=-1"], "dp_shard=-1 follows from the world; give --world N"),
        (["world_size=8", "--world", "4"], "world_size=4 is not the world_size=8"),
        (["--world", "9" * 5000], "is not at most 262144"),
        (["tp=" + "9" * 5000], "is more than the 262144 ranks"),
        (["tp=65536", "pp=65536"], "world_size=4294967296 is more than the 262144 ranks"),
        (["--world", "none"], "--world 'none' is not a positive integer"),
        (["--world", "0"], "--world '0' is not a positive integer"),
        (["--config", "absent.toml"], "cannot read absent.toml: No such file"),
        (["--config", "absent.ini"], "its name must end in .toml, .yaml, .yml or .json"),
    ],
)
def test_wrong_degrees_are_refused_by_every_command(argv: list[str], message: str) -> None:
    for command in (["check"], ["show"], ["explain"], ["groups", "tp"]):
        assert message in refused(*command, *argv)


def test_everything_that_is_wrong_is_in_one_message() -> None:
    argv = ["check", "tensor=2", "pp4", "--model", "llama9", "--seq-len", "long"]
    argv += ["--world", "many", "--global-batch", "-1", "--ranks-per-node", "0"]
    message = refused(*argv)
    for part in ("'tensor'", "'pp4'", "no model 'llama9'", "--seq-len 'long'"):
        assert part in message
    for part in ("--world 'many'", "--global-batch '-1'", "--ranks-per-node '0'"):
        assert part in message
    assert message.count("hp-mesh check:") == 1


def test_wrong_input_leaves_one_json_document_too() -> None:
    code, out, err = run("check", "tp=3", "--world", "4", "--model", "llama9", "--json")
    found = json.loads(out)["violations"]
    assert code == 2
    assert [violation["rule"] for violation in found] == ["product", "model"]
    assert found[0]["legal"] == {"tp": [1, 2, 4]}
    assert all(violation["text"] in err for violation in found)


DEEP = 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"tp": ' + "[" * DEEP + "]" * DEEP + "}"),
        ("c.json", '{"tp": ' + "[" * 65 + "]" * 65 + "}"),
        ("c.toml", "tp = " + "[" * DEEP + "]" * DEEP),
        ("c.yaml", "tp: " + "[" * 500 + "]" * 500),
        ("c.yaml", "tp: &a [*a]"),
    ],
)
def test_a_file_that_is_nested_too_deeply_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    for argv in (["show", "--config", str(path)], ["check", "tp=2", "--model", str(path)]):
        assert f"cannot read {path}: its values are nested in more than 64" in refused(*argv)


@pytest.mark.parametrize("digits", [400, 4000, 5000])
@pytest.mark.parametrize("quote", ["", '"'])
def test_a_number_of_thousands_of_digits_makes_no_traceback(
    digits: int, quote: str, tmp_path: Path
) -> None:
    number = quote + "9" * digits + quote
    path = tmp_path / "c.json"
    for name in ("tp", "world_size", "ulysses_degree"):
        path.write_text(f'{{"{name}": {number}}}')
        refused("check", "--config", str(path))
    for name in ("num_attention_heads", "num_hidden_layers", "num_experts"):
        path.write_text(f'{{"{name}": {number}}}')
        code, out, err = run("check", "tp=2", "pp=4", "ep=2", "--model", str(path))
        assert (code, "Traceback" in err) == (2, False)
        assert out or err


def test_values_that_are_nested_less_deeply_are_told(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"tp": ' + "[" * 60 + "]" * 60 + "}")
    assert "tp=[[[" in refused("show", "--config", str(path))


@pytest.mark.parametrize("command", ["check", "explain"])
def test_what_a_model_refuses_whatever_the_world_is_told_with_a_world_that_is_not_made(
    command: str,
) -> None:
    argv = [command, "tp=3", "ep=2", "--world", "4", "--model", "llama3-8b", "--seq-len", "8192"]
    message = refused(*argv, "--global-batch", "7")
    assert "tp=3 does not divide world_size=4; use 1, 2 or 4" in message
    for name in ("num_attention_heads=32", "num_key_value_heads=8", "seq_len=8192"):
        assert f"tp=3 does not divide {name}" in message
    assert "ep=2 has no experts to divide" in message
    # dp_shard is not known, and with one rank of it any batch is well.
    assert "global_batch" not in message
    message = refused(*argv, "--global-batch", "7", "dp_shard=2")
    assert "dp_shard=2 does not divide global_batch=7" in message


def test_a_model_is_judged_next_to_values_that_are_no_degrees() -> None:
    message = refused("check", "tp=16", "pp=none", "--model", "llama3-8b", "--seq-len", "many")
    assert "pp='none' is not a degree" in message
    assert "--seq-len 'many' is not a positive integer" in message
    assert "tp=16 does not divide num_key_value_heads=8" in message


@pytest.mark.parametrize("command", [["show"], ["groups", "tp"], ["check"]])
def test_nodes_that_the_ranks_do_not_fill_are_refused(command: list[str]) -> None:
    code, out, err = run(*command, "tp=2", "--world", "12", "--ranks-per-node", "8")
    assert code == 2
    assert "ranks_per_node=8 does not divide world_size=12; use 1, 2, 3, 4, 6 or 12" in out + err
    assert run(*command, "tp=2", "--world", "12")[0] == 0
    assert run(*command, "tp=2", "--world", "4", "--ranks-per-node", "8")[0] == 0


def test_plan_refuses_nodes_that_the_ranks_do_not_fill() -> None:
    argv = ["plan", "--model", "llama3-8b", "--gpus", "12", "--seq-len", "8192"]
    argv += ["--global-batch", "12"]
    message = refused(*argv, "--ranks-per-node", "5")
    assert "ranks_per_node=5 does not divide world_size=12; use 1, 2, 3, 4, 6 or 12" in message
    assert message.count("ranks_per_node=5") == 1
    unfilled = "note: 12 ranks do not fill nodes of 8, so the last node has 4; --ranks-per-node N"
    code, out, _ = run(*argv)
    assert (code, unfilled in out) == (0, True)
    code, out, _ = run(*argv, "--ranks-per-node", "4")
    assert (code, unfilled in out) == (0, False)


def test_groups_say_that_the_axis_comes_first() -> None:
    message = refused("groups", "tp=2", "tp=4", "--world", "8")
    assert "'tp=2' is not an axis; AXIS comes first: hp-mesh groups tp tp=8" in message
    code, _, err = run("groups")
    assert code == 2
    assert err.endswith("the following arguments are required: AXIS\n")


def test_an_unknown_axis_and_rank_are_refused() -> None:
    assert "no axis 'tensor'; use" in refused("groups", "tensor", "tp=2")
    assert "no axis 'tensor'; use" in refused("show", "tp=2", "--axis", "tensor")
    assert "rank=2 is not in a world of 2" in refused("groups", "tp", "tp=2", "--rank", "2")
    assert "--rank '-2' is not an integer" in refused("groups", "tp", "tp=2", "--rank", "-2")


@pytest.mark.parametrize("command", ["check", "estimate"])
@pytest.mark.parametrize("text", ["4_096", "+4096", "4096.0", " 4096", "\uff14096", "9" * 5000])
def test_all_commands_read_the_same_integers(command: str, text: str) -> None:
    argv = [command, "tp=2", "dp_shard=4", "--model", "llama3-8b", "--global-batch", "64"]
    assert run(*argv, "--seq-len", "4096")[0] == 0
    message = refused(*argv, f"--seq-len={text}")
    assert "seq" in message
    assert len(message) < 5500
    assert run(*argv, f"--global-batch={text}", "--seq-len", "4096")[0] == 2


@pytest.mark.parametrize("text", ["1_0", "\uff11", "-1", "--"])
def test_a_bandwidth_is_a_number_in_ascii_digits(text: str) -> None:
    argv = ["estimate", "tp=2", "dp_shard=4", "--model", "llama3-8b", "--global-batch", "64"]
    assert "intra_gbs=" in refused(*argv, "--seq-len", "4096", f"--intra-gbs={text}")


def test_an_unknown_option_or_command_is_refused() -> None:
    for argv in (["check", "--wrold", "4"], ["chek"], [], ["plan"]):
        code, out, err = run(*argv)
        assert code == 2
        assert out == ""
        assert "usage: hp-mesh" in err


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert "cannot write" in refused("show", "tp=2", "--svg", str(tmp_path / "no" / "x.svg"))
    (tmp_path / "folder").mkdir()
    for name in ("picture", "picture.", "picture.jpg", "folder"):
        message = refused("show", "tp=2", "--picture", str(tmp_path / name))
        assert f"cannot write {tmp_path / name}: its name must end in .svg, .png or .pdf" in message
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_name_of_a_picture_is_checked_before_a_search(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    argv = ["plan", "--model", "llama3-8b", "--gpus", "8", "--gpu", "h7", "--picture", str(path)]
    message = refused(*argv, "--seq-len", "4096", "--global-batch", "64")
    assert f"cannot write {path}: its name must end in" in message
    assert "'h7'" in message


def test_a_folder_in_the_place_of_a_picture_is_refused_before_a_search(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.mkdir()
    argv = ["plan", "--model", "llama3-8b", "--gpus", "8", "--picture", str(path)]
    message = refused(*argv, "--seq-len", "4096", "--global-batch", "64")
    assert message == f"hp-mesh plan: cannot write {path}: it is a folder\n"


def test_a_plan_without_a_configuration_writes_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    argv = ["plan", "--model", "gpt-22b", "--gpus", "7919", "--picture", str(path), "--json"]
    code, _, err = run(*argv, "--seq-len", "8191", "--global-batch", "3")
    assert (code, path.exists()) == (1, False)
    assert err == "hp-mesh plan: no picture: no configuration keeps all rules\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_is_printed_even_if_its_picture_cannot_be_written(
    form: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.svg"
    path.symlink_to("/dev/full")
    code, out, err = run("show", "tp=2", *form, "--picture", str(path))
    assert (code, out) == (2, run("show", "tp=2", *form)[1])
    assert err.startswith(f"hp-mesh show: cannot write {path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"dp_shard": 4, "seq_len": 1000000}', "'seq_len' is not a field"),
        ("c.toml", "tp = ", "cannot read"),
        ("c.json", "{", "cannot read"),
        ("c.json", "[1]", "holds list and not named fields"),
        ("c.yaml", "tp: [", "cannot read"),
        ("c.yaml", "- 1", "holds list and not named fields"),
        ("c.toml", "tpp = 2", "'tpp' is not a field"),
    ],
)
def test_a_file_that_holds_no_degrees_is_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert message in refused("show", "--config", str(path))


def test_a_model_file_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "cannot read" in refused("check", "tp=2", "--model", str(path))
    path.write_text('{"num_attention_heads": "many"}')
    code, out, _ = run("check", "tp=2", "--model", str(path))
    assert code == 2
    assert "num_attention_heads='many' is not a positive integer" in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "tp = 4\ndp_shard = -1\nworld_size = 16"),
        ("c.json", json.dumps(TABLE)),
        ("c.yaml", "tp: 4\ndp_shard: -1\nworld_size: 16"),
        ("c.toml:run.mesh", "[run.mesh]\ntp = 4\nworld_size = 16"),
        ("c.json:run.mesh", json.dumps({"run": {"mesh": TABLE}})),
        ("c.yaml:run", "run:\n  tp: 4\n  world_size: 16"),
    ],
)
def test_degrees_come_from_files_and_words_replace_them(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name.split(":")[0]).write_text(text)
    place = str(tmp_path / name)
    told = document("show", "--config", place)["dims"]
    assert (told["tp"], told["dp_shard"], told["world_size"]) == (4, 4, 16)
    told = document("show", "tp=8", "--config", place)["dims"]
    assert (told["tp"], told["dp_shard"]) == (8, 2)


TITAN = "[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"


@pytest.mark.parametrize(
    ("name", "text", "etp"),
    [
        ("run.toml:parallelism", TITAN + "enable_async_tensor_parallel = false\n", 1),
        ("run.json", '{"tensor_model_parallel_size": 2, "num_layers": 4}', 2),
        ("run.yaml", "tensor_model_parallel_size: 2\nexpert_tensor_parallel_size: 1", 1),
    ],
)
def test_a_table_of_a_framework_is_read_as_by_python_and_words_replace_its_degrees(
    name: str, text: str, etp: int, tmp_path: Path
) -> None:
    path, _, table = name.partition(":")
    (tmp_path / path).write_text(text)
    read = ParallelDims.from_yaml if path.endswith("yaml") else ParallelDims.from_toml
    place = ["--config", str(tmp_path / name), "--world", "16"]
    told = document("show", *place)["dims"]
    assert (told["tp"], told["dp_shard"], told["etp"]) == (2, 8, etp)
    if not path.endswith("json"):
        assert told == read(tmp_path / path, table or None, 16).to_dict()
    told = document("show", *place, "tp=4", "pp=2")["dims"]
    assert (told["tp"], told["pp"], told["dp_shard"]) == (4, 2, 2)
    assert told["etp"] == (4 if etp == 2 else 1)
    assert document("show", *place, "etp=1")["dims"]["etp"] == 1
    (tmp_path / path).write_text(text.replace("2", "3"))
    assert "tp=3 does not divide world_size=16" in refused("check", *place)


def test_a_table_of_a_framework_that_says_two_things_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"tensor_model_parallel_size": 2, "tp": 4, "pp_size": 3}')
    message = refused("check", "--config", str(path), "--world", "8")
    assert "tensor_model_parallel_size=2 and tp=4 differ" in message
    assert "from_config does not read pp_size=3; use pp" in message


def test_an_absent_table_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[mesh]\ntp = 2\n[other]\n")
    message = refused("show", "--config", f"{path}:mash")
    assert "c.toml has no 'mash'; use mesh or other" in message


def test_words_may_stand_before_and_after_options() -> None:
    told = document("show", "tp=2", "--world", "16", "cp=2", "--axis", "cp", "pp=2")["dims"]
    assert (told["tp"], told["cp"], told["pp"], told["dp_shard"]) == (2, 2, 2, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "ulysses_degree")
NUMBERS = ("num_attention_heads", "num_key_value_heads", "num_experts", "intermediate_size")


@given(st.sampled_from((*DEGREES, "world_size", "ep_mode", "fsdp_folds_cp", "other")), JSON)
@settings(deadline=None, max_examples=80)
def test_no_value_in_a_file_makes_a_traceback(name: str, value: object) -> None:
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({name: value}, file)
        file.flush()
        code, out, err = run("check", "--config", file.name)
    assert (code == 0 and out) or (code == 2 and err.startswith("hp-mesh check:"))


@given(st.sampled_from((*NUMBERS, "vocab_size", "text_config", "config")), JSON)
@settings(deadline=None, max_examples=60)
def test_no_value_in_a_model_file_makes_a_traceback(name: str, value: object) -> None:
    with NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({name: value}, file)
        file.flush()
        code, out, _ = run("check", "tp=2", "ep=2", "--model", file.name)
    assert code in (0, 2)
    assert out


def test_without_a_world_it_is_the_product_of_the_degrees() -> None:
    assert document("show", "tp=4", "pp=2")["dims"]["world_size"] == 8
    assert document("show")["dims"]["world_size"] == 1
    told = document("show", "tp=4", "ep=2", "ep_mode=peer")["dims"]
    assert told["world_size"] == 8


def test_a_world_that_cannot_be_read_makes_no_other_errors() -> None:
    message = refused("show", "dp_shard=-1", "--world", "many", "--ranks-per-node", "0")
    assert message.count("\n") == 2
    assert "--world 'many'" in message
    assert "--ranks-per-node '0'" in message


def test_a_degree_that_a_file_leaves_out_is_named_as_from_config_does(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"tensor_model_parallel_size": 2}))
    expected = ParallelDims.from_config(json.loads(path.read_text()), 8).summary()
    assert expected.endswith("etp=2 (from tp) world=8")
    argv = ["check", "--config", str(path), "--world", "8"]
    assert run(*argv)[1].splitlines()[0] == expected
    assert "etp=4 (from tp)" in run(*argv, "tp=4")[1]
    assert "etp=2 world=8" in run(*argv, "etp=2")[1]


def test_a_free_etp_is_no_error_of_the_model_next_to_wrong_degrees(tmp_path: Path) -> None:
    path = tmp_path / "moe.json"
    path.write_text(json.dumps({"num_local_experts": 8, "moe_intermediate_size": 30}))
    words = ["etp=4", "free_etp=true", "dp_shard=7", "tp=1"]
    code, _, err = run("check", *words, "--model", str(path))
    assert code == 2
    assert "etp=4 does not divide moe_intermediate_size=30; use 1, 2, 3, 5, 6, 10" in err


def test_a_wrong_number_of_ranks_per_node_is_one_error() -> None:
    argv = ["plan", "--model", "llama3-8b", "--gpus", "8", "--seq-len", "4096"]
    code, _, err = run(*argv, "--global-batch", "8", "--ranks-per-node", "x")
    assert code == 2
    assert err.count("node") == 1
