"""Weights in and out of safetensors files: every layout, each rank its own elements, errors."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hp_dtensor.sources import (
    Concatenate,
    Reorder,
    Slice,
    Source,
    SourcePlan,
    Stack,
    Stored,
    Transpose,
)
from hp_fsdp import (
    CheckpointError,
    fully_shard,
    load_safetensors,
    parameters_on_meta,
    save_safetensors,
)

from .models import Net, loss_of, make, mesh_of, tokens

Ranks = Callable[[int], RankPool]
INDEX = "model.safetensors.index.json"


class Buffered(Net):
    """A net with a persistent buffer, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.scale = nn.Parameter(torch.randn(()))


class Tied(Net):
    """A net with one weight for head and embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight


def weights(kind: Callable[[], nn.Module] = Buffered) -> dict[str, Tensor]:
    state = make(kind).state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def stored(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    """Write tensors as `save_pretrained` does: one file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    located: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        chosen = dict([*tensors.items()][number::files])
        save_file(chosen, folder / name)
        located |= dict.fromkeys(chosen, name)
    index = {"metadata": {"total_size": 1}, "weight_map": located}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def spread(model: Any, how: str, ranks: int) -> Any:
    """Shard a model in one of the layouts of this test."""
    if how == "plain":
        return model
    if how == "torch":
        for block in (*model.blocks, model):
            torch_fully_shard(
                block, mesh=mesh_of((ranks,), ("fsdp",)), ignored_params=scalars(model)
            )
        return model
    mesh = mesh_of((ranks,), ("fsdp",))
    if how in ("tensor parallel", "replicas"):
        mesh = mesh_of((ranks // 2, 2), ("a", "b"))
    if how == "tensor parallel":
        for block in model.blocks:
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["b"], plan, src_data_rank=None)
        mesh = mesh["a"]
    layout: Any = "ragged" if how == "ragged" else "exact"
    for block in (*model.blocks, model):
        fully_shard(block, mesh, layout=layout, ignored_params=scalars(model))
    return model


def scalars(model: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in model.parameters() if parameter.ndim == 0}


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    persistent = set(model.state_dict())
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if name in persistent:
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = full.detach().clone()
    return found


def built(kind: Callable[[], nn.Module], how: str, ranks: int, meta: bool) -> Any:
    """Build a model with other values, or without any."""
    torch.manual_seed(1)
    with parameters_on_meta() if meta else nullcontext():
        model: Any = kind()
    model.to(torch.float64)
    assert all(parameter.is_meta == meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    return spread(model, how, ranks)


def loaded(
    rank: int, folder: str, how: str, ranks: int, meta: bool, kind: Any, sources: Any = None
) -> tuple[dict[str, Tensor], float, bool]:
    model = built(kind, how, ranks, meta)
    load_safetensors(model, folder, sources=sources)
    found = whole(model)
    is_tied = kind is not Tied or model.head.weight is model.embedding.weight
    return found, float(loss_of(model, tokens(0)).detach()), is_tied


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names with different values. Both must have the same names."""
    assert set(found) == set(expected)
    return [name for name in found if not torch.equal(found[name], expected[name])]


LAYOUTS = ("exact", "ragged", "replicas", "tensor parallel", "torch")


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", LAYOUTS)
def test_any_layout_loads(ranks: Ranks, tmp_path: Path, how: str, meta: bool) -> None:
    expected, reference = weights(), make(Buffered)
    folder = stored(tmp_path, expected, files=3)
    loss = float(loss_of(reference, tokens(0)).detach())
    for found, own, _ in ranks(4).run(loaded, str(folder), how, 4, meta, Buffered):
        assert equal(found, expected) == []
        assert own == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("meta", [False, True])
def test_one_process_loads(tmp_path: Path, meta: bool) -> None:
    expected = weights()
    found, _, _ = loaded(0, str(stored(tmp_path, expected)), "plain", 1, meta, Buffered)
    assert equal(found, expected) == []


@pytest.mark.parametrize("how", ["exact", "ragged", "plain"])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("names", [1, 2])
def test_tied_parameters(ranks: Ranks, tmp_path: Path, how: str, meta: bool, names: int) -> None:
    expected = weights(Tied)
    file = dict(expected)
    file["head.weight"] = file["head.weight"].clone()  # the library refuses shared memory
    if names == 1:
        del file["head.weight"]
    folder = str(stored(tmp_path, file))
    for found, _, is_tied in ranks(2).run(loaded, folder, how, 2, meta, Tied):
        assert equal(found, expected) == []
        assert is_tied


def test_names_of_one_tied_parameter_with_other_values(ranks: Ranks, tmp_path: Path) -> None:
    file = weights(Tied)
    file["head.weight"] = file["head.weight"] + 1
    for message in ranks(2).run(refused, str(stored(tmp_path, file)), Tied):
        assert "embedding.weight and head.weight" in message
        assert "tied" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_converted(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights().items()}
    folder = str(stored(tmp_path, expected))
    for found, _, _ in ranks(2).run(loaded, folder, "exact", 2, True, Buffered):
        assert (
            equal(found, {name: tensor.to(found[name]) for name, tensor in expected.items()}) == []
        )


# Sources.


def pieces(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store a net's tensors in other pieces, for `SOURCES`."""
    made = dict(state)
    for index, row in enumerate(made.pop("blocks.0.table")):
        made[f"row.{index}"] = row.clone()
    up = made.pop("blocks.1.up.weight")
    made["up.first"], made["up.second"] = up[:5].clone(), up[5:].clone()
    made["head.transposed"] = made.pop("head.weight").t().contiguous()
    made["reordered"] = made.pop("blocks.2.down.weight").flip(0)
    made["joined"] = torch.cat([made.pop(f"blocks.{n}.norm.weight") for n in (1, 2)])
    return made


SOURCES: dict[str, Source] = {
    "blocks.0.table": Stack([Stored(f"row.{index}") for index in range(3)]),
    "blocks.1.up.weight": Concatenate([Stored("up.first"), Stored("up.second")]),
    "head.weight": Transpose(Stored("head.transposed")),
    "blocks.2.down.weight": Reorder(Stored("reordered"), range(7, -1, -1)),
    "blocks.1.norm.weight": Slice(Stored("joined"), 0, 0, 8),
    "blocks.2.norm.weight": Slice(Stored("joined"), 0, 8, 16),
}


def rule(shapes: Any) -> SourcePlan:
    """Choose the same pieces to save."""
    if shapes is not None:
        return SourcePlan(SOURCES, shapes)
    made = {name: tuple(tensor.shape) for name, tensor in pieces(weights()).items()}
    same = {name: Stored(name) for name in weights() if name in made}
    return SourcePlan({**same, **SOURCES}, made)


@pytest.mark.parametrize("sources", [SOURCES, rule], ids=["mapping", "rule"])
@pytest.mark.parametrize("how", LAYOUTS)
def test_parameters_made_of_other_pieces(
    ranks: Ranks, tmp_path: Path, how: str, sources: Any
) -> None:
    expected = weights()
    folder = str(stored(tmp_path, pieces(expected), files=2))
    for found, _, _ in ranks(4).run(loaded, folder, how, 4, True, Buffered, sources):
        assert equal(found, expected) == []


# Saving.


def exported(
    rank: int, folder: str, how: str, ranks: int, kind: Any, options: dict[str, Any]
) -> dict[str, Tensor]:
    model = built(kind, how, ranks, meta=False)
    save_safetensors(model, folder, **options)
    return whole(model)


def files_of(folder: Path) -> dict[str, Tensor]:
    """Read a folder with the library and by its index."""
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if len(files) > 1:
        located = json.loads((folder / INDEX).read_text())["weight_map"]
        assert {name: file.name for file in files for name in load_file(file)} == located
    assert {path.name for path in folder.iterdir()} - {file.name for file in files} <= {INDEX}
    return found


@pytest.mark.parametrize("limit", [10**9, 3000])
@pytest.mark.parametrize("how", [*LAYOUTS, "plain"])
def test_any_layout_saves(ranks: Ranks, tmp_path: Path, how: str, limit: int) -> None:
    options = {"max_file_bytes": limit}
    results = ranks(4).run(exported, str(tmp_path / "out"), how, 4, Buffered, options)
    found = files_of(tmp_path / "out")
    assert equal(found, results[0]) == []
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert (len(sizes) > 1) == (limit == 3000)


@pytest.mark.parametrize("how", LAYOUTS)
def test_other_pieces_are_saved(ranks: Ranks, tmp_path: Path, how: str) -> None:
    (expected, *_) = ranks(4).run(
        exported, str(tmp_path / "out"), how, 4, Buffered, {"sources": rule}
    )
    assert equal(files_of(tmp_path / "out"), pieces(expected)) == []


def test_saving_converts_floating_point_values(ranks: Ranks, tmp_path: Path) -> None:
    options = {"dtype": torch.bfloat16}
    (expected, *_) = ranks(2).run(exported, str(tmp_path / "out"), "exact", 2, Buffered, options)
    found = files_of(tmp_path / "out")
    assert found["count"].dtype == torch.int64
    assert found["embedding.weight"].dtype == torch.bfloat16
    assert equal(found, {name: t.to(found[name].dtype) for name, t in expected.items()}) == []


def test_a_tied_parameter_is_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    (expected, *_) = ranks(2).run(exported, str(tmp_path / "out"), "exact", 2, Tied, {})
    del expected["head.weight"]
    assert equal(files_of(tmp_path / "out"), expected) == []


def stages(rank: int, folder: str) -> None:
    """Save two stages of a pipeline, one on each rank, and load them again."""
    model: Any = make(Net)
    stage = nn.ModuleDict({"embedding": model.embedding} if rank == 0 else {"head": model.head})
    before = {name: tensor.detach().clone() for name, tensor in stage.state_dict().items()}
    save_safetensors(stage, folder)
    for parameter in stage.parameters():
        nn.init.zeros_(parameter)
    load_safetensors(stage, folder)
    assert equal({**stage.state_dict()}, before) == []


def test_ranks_with_different_parts_of_a_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(stages, str(tmp_path))
    assert sorted(files_of(tmp_path)) == ["embedding.weight", "head.bias", "head.weight"]


def transposed_stage(rank: int, folder: str) -> None:
    """Save two stages by rules that know the own stage only."""
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"layer{rank}": nn.Linear(4, 6)})
    name = f"layer{rank}.weight"

    def own(shapes: Any) -> SourcePlan:
        return SourcePlan({name: Transpose(Stored(f"{name}_t"))}, shapes or {f"{name}_t": (4, 6)})

    save_safetensors(stage, folder, sources=own)
    layer = cast(nn.Linear, stage[f"layer{rank}"])
    expected = layer.weight.detach().clone()
    assert torch.equal(load_file(Path(folder) / "model.safetensors")[f"{name}_t"], expected.t())
    nn.init.zeros_(layer.weight)
    load_safetensors(stage, folder, sources=own)
    assert torch.equal(layer.weight, expected)


def test_stages_with_sources_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(transposed_stage, str(tmp_path))


def half(shapes: Any) -> SourcePlan:
    return SourcePlan({"weight": Slice(Stored("big"), 0, 0, 2)}, {"big": (4, 3)})


def twice(shapes: Any) -> SourcePlan:
    return SourcePlan({"0.weight": Stored("one"), "1.weight": Stored("one")}, {"one": (2, 3)})


def misspelt(shapes: Any) -> SourcePlan:
    return SourcePlan({"wieght": Stored("one")}, {"one": (2, 3)})


@pytest.mark.parametrize(
    ("layers", "sources", "words"),
    [
        (1, half, "leave out elements of big"),
        (2, twice, "give some elements twice of one"),
        (1, misspelt, "names that the model does not have: wieght"),
    ],
)
def test_sources_must_give_each_element_once(
    tmp_path: Path, layers: int, sources: Any, words: str
) -> None:
    parts = [nn.Linear(3, 2, bias=False) for _ in range(layers)]
    model = parts[0] if layers == 1 else nn.Sequential(*parts)
    with pytest.raises(CheckpointError, match=words):
        save_safetensors(model, tmp_path / "out", sources=sources)
    assert not (tmp_path / "out").exists()


def same_names(rank: int, folder: str) -> str:
    """Save two stages that number their layers from 0."""
    with pytest.raises(CheckpointError) as caught:
        save_safetensors(nn.Sequential(nn.Linear(2, 2, bias=rank == 0)), folder)
    return str(caught.value)


def test_parts_with_the_same_name(ranks: Ranks, tmp_path: Path) -> None:
    message = one_message(ranks(2).run(same_names, str(tmp_path / "out")))
    assert "ranks 0 and 1 have different models with the same name 0.weight" in message


def test_only_floating_point_dtypes_convert(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="int8 is not a floating"):
        save_safetensors(nn.Linear(2, 2), tmp_path / "out", dtype=torch.int8)


def test_parameters_that_existed_before_stay_tied() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    vars(weight)["note"] = "kept"
    with parameters_on_meta():
        one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        one.weight = weight
        two.weight = weight
    assert one.weight is two.weight
    assert one.weight.is_meta
    assert vars(one.weight)["note"] == "kept"


class OwnParameter(nn.Parameter):
    """A subclass of ``nn.Parameter``."""


class TiedBuffers(nn.Module):
    """A buffer with two names, and a parameter of a subclass with two names."""

    one: Tensor
    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        one = torch.arange(3.0)
        self.register_buffer("one", one)
        self.register_buffer("two", one)
        self.weight = OwnParameter(torch.ones(3))
        self.alias = self.weight


def test_tied_buffers_and_classes_on_the_meta_device(tmp_path: Path) -> None:
    values = {"one": torch.tensor([1.0, 2, 3]), "weight": torch.zeros(3)}
    folder = stored(tmp_path, values)
    with torch.device("meta"):
        model = TiedBuffers()
    load_safetensors(model, folder)
    assert model.one is model.two
    assert model.weight is model.alias
    assert type(model.weight) is OwnParameter
    assert torch.equal(model.one, values["one"])


def test_one_stored_tensor_for_two_parameters(tmp_path: Path) -> None:
    """A checkpoint with tied weights loads into an untied model."""
    model, folder = Net().double(), weights(Tied)
    bias = torch.zeros(11, dtype=torch.float64)
    file = {**{n: t for n, t in folder.items() if n != "head.weight"}, "head.bias": bias}
    load_safetensors(
        model,
        stored(tmp_path, file),
        sources={"head.weight": Stored("embedding.weight")},
    )
    assert torch.equal(model.head.weight, model.embedding.weight)
    assert model.head.weight is not model.embedding.weight


def test_parts_of_names_that_wrappers_insert() -> None:
    from hp_fsdp.weights._common import plain_name

    assert plain_name("_orig_mod.layer._checkpoint_wrapped_module.weight") == "layer.weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"


def failing(rank: int, folder: str) -> str:
    """Load while rank 1 has no memory for its parameters."""
    from hp_fsdp.weights import _load

    model = built(Buffered, "exact", 2, meta=True)

    def give(*_: object) -> None:
        if rank == 1:
            raise MemoryError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_load, "materialize", give)
        with pytest.raises(CheckpointError) as caught:
            load_safetensors(model, folder)
    return str(caught.value)


def test_all_ranks_raise_if_one_has_no_memory(ranks: Ranks, tmp_path: Path) -> None:
    message = one_message(ranks(2).run(failing, str(stored(tmp_path, weights()))))
    assert message == "rank 1: MemoryError: no memory"


def full_disk(rank: int, folder: str, step: str) -> str:
    """Save while the disk is full, at the creation of files or at the index."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    model = built(Buffered, "exact", 2, meta=False)
    with pytest.MonkeyPatch.context() as patch:
        if step == "content":
            patch.setattr("os.pwrite", fail)
        else:
            patch.setattr(Path, "open" if step == "header" else "write_text", fail)
        with pytest.raises(CheckpointError) as caught:
            save_safetensors(model, folder, max_file_bytes=3000)
    return str(caught.value)


@pytest.mark.parametrize("step", ["header", "content", "index"])
def test_no_file_is_left_on_a_full_disk(ranks: Ranks, tmp_path: Path, step: str) -> None:
    message = one_message(ranks(2).run(full_disk, str(tmp_path / "out"), step))
    assert "cannot be written: No space left on device" in message
    assert [*(tmp_path / "out").iterdir()] == []


# Errors: the same on all ranks, before the model is changed.


def refused(rank: int, folder: str, kind: Any = Buffered, sources: Any = None) -> str:
    model = built(kind, "exact", 2, meta=False)
    before = whole(model)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, folder, sources=sources)
    if "tied" not in str(caught.value):
        assert equal(whole(model), before) == []
    return str(caught.value)


def one_message(messages: list[str]) -> str:
    assert len(set(messages)) == 1
    return messages[0]


def test_one_error_lists_all_names_that_do_not_fit(ranks: Ranks, tmp_path: Path) -> None:
    file = weights()
    del file["blocks.0.one"], file["head.bias"]
    file["blocks.9.one"] = torch.ones(1)
    file["blocks.0.up.bias"] = torch.ones(7)
    file["blocks.1.up.weight"] = file["blocks.1.up.weight"].to(torch.int8)
    message = one_message(ranks(2).run(refused, str(stored(tmp_path, file))))
    for words in (
        "missing in the files: blocks.0.one, head.bias;",
        "not in the model: blocks.9.one",
        "blocks.0.up.bias has shape (36,), and (7,) in the files",
        "blocks.1.up.weight is stored as I8",
        "quantized",
        "sources=",
    ):
        assert words in message


def damage(folder: Path, how: str) -> None:
    index = folder / INDEX
    located = json.loads(index.read_text())
    second = folder / "model-00002-of-00003.safetensors"
    if how == "file missing":
        second.unlink()
    elif how == "file cut off":
        second.write_bytes(second.read_bytes()[:-4])
    elif how == "header damaged":
        second.write_bytes(b"\xff" * 40 + second.read_bytes()[40:])
    elif how == "index missing":
        index.unlink()
    elif how == "index is no JSON":
        index.write_text(index.read_text()[:-20])
    elif how == "no weight_map":
        index.write_text("{}")
    elif how == "path in the index":
        located["weight_map"]["head.bias"] = "../other.safetensors"
        index.write_text(json.dumps(located))
    elif how == "name in another file":
        files = sorted(set(located["weight_map"].values()))
        files.remove(located["weight_map"]["head.bias"])
        located["weight_map"]["head.bias"] = files[0]
        index.write_text(json.dumps(located))
    elif how == "name missing in the index":
        del located["weight_map"]["head.bias"]
        index.write_text(json.dumps(located))
    elif how == "name in two files":
        name = next(n for n, file in located["weight_map"].items() if file == second.name)
        other = load_file(folder / "model-00003-of-00003.safetensors")
        save_file({**other, name: torch.ones(1)}, folder / "model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("file missing", "model-00002-of-00003.safetensors is missing"),
        ("file cut off", "model-00002-of-00003.safetensors is damaged"),
        ("header damaged", "model-00002-of-00003.safetensors is damaged"),
        ("index missing", f"3 safetensors files .* and no {INDEX}"),
        ("index is no JSON", f"{INDEX} cannot be read"),
        ("no weight_map", f"{INDEX} has no weight_map"),
        ("path in the index", "names of files in its folder"),
        ("name in another file", "files that lack these tensors: head.bias;"),
        ("name missing in the index", "lacks tensors that its files have: head.bias"),
        ("name in two files", "is in model-0000[23].* and in model-0000[23]"),
    ],
)
def test_damaged_folders(ranks: Ranks, tmp_path: Path, how: str, words: str) -> None:
    damage(stored(tmp_path, weights(), files=3), how)
    assert re.search(words, one_message(ranks(2).run(refused, str(tmp_path))))


def test_a_folder_without_files(ranks: Ranks, tmp_path: Path) -> None:
    message = one_message(ranks(2).run(refused, str(tmp_path)))
    assert "0 safetensors files (none)" in message
    message = one_message(ranks(2).run(refused, str(tmp_path / "none")))
    assert "is not a folder" in message


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"blocks.7": Stored("head.bias")}, "names that the model does not have: blocks.7"),
        ({"head.bias": Stored("absent")}, "head.bias (made of absent)"),
        (
            {"head.bias": Stack([Stored("head.bias"), Stored("embedding.weight")])},
            "one shape",
        ),
    ],
)
def test_wrong_sources(ranks: Ranks, tmp_path: Path, sources: Any, words: str) -> None:
    folder = str(stored(tmp_path, weights()))
    assert words in one_message(ranks(2).run(refused, folder, Buffered, sources))


def test_a_file_that_one_rank_cannot_read(ranks: Ranks, tmp_path: Path) -> None:
    stored(tmp_path, weights())
    assert "rank 1: " in one_message(ranks(2).run(unreadable, str(tmp_path)))


def unreadable(rank: int, folder: str) -> str:
    """Load files that rank 1 cannot see, as on a local disk."""
    model = built(Buffered, "exact", 2, meta=False)
    path: Any = Path(folder) if rank == 0 else _Elsewhere(folder)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, path)
    return str(caught.value)


class _Elsewhere:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __fspath__(self) -> str:
        return self.folder + "/elsewhere"


def two_folders(rank: int, folders: list[str]) -> str:
    model = built(Buffered, "exact", 2, meta=False)
    before = whole(model)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, folders[rank])
    assert equal(whole(model), before) == []
    return str(caught.value)


def test_ranks_that_see_different_weights(ranks: Ranks, tmp_path: Path) -> None:
    first = str(stored(tmp_path / "first", weights()))
    other = {n: t + 1 for n, t in weights().items()}  # the same names, shapes and sizes
    folders = [first, str(stored(tmp_path / "second", other))]
    for message in ranks(2).run(two_folders, folders):
        assert "ranks 0, 1 see different files in" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": {"head.bias": "head.bias"}}, "is of type str; use a Source"),
        ({"sources": 3}, "sources is of type int; use a mapping"),
        ({"folder": ""}, "folder='' is not the path of a folder"),
        ({"folder": None}, "folder=None is not the path of a folder"),
    ],
)
def test_arguments_of_other_types_to_load(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    given = {"folder": str(stored(tmp_path, weights())), **options}
    with pytest.raises(CheckpointError, match=words):
        load_safetensors(Buffered().double(), **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sources": SOURCES}, "sources is of type dict; to save, use a function"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is not a floating-point dtype"),
        ({"max_file_bytes": "5GB"}, "max_file_bytes='5GB' is not a number of bytes"),
        ({"max_file_bytes": 0}, "max_file_bytes=0 is not a number of bytes"),
        ({"folder": ""}, "folder='' is not the path of a folder"),
    ],
)
def test_arguments_of_other_types_to_save(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        save_safetensors(nn.Linear(2, 2), **{"folder": tmp_path / "out", **options})


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(CheckpointError, match="is a pointer of Git LFS; run git lfs pull"):
        load_safetensors(nn.Linear(2, 2), tmp_path)


def test_the_dtype_of_buffers_stays(tmp_path: Path) -> None:
    """Rounding the bias of a router would change the chosen experts."""
    model = nn.BatchNorm1d(3)
    save_safetensors(model, tmp_path / "out", dtype=torch.bfloat16)
    found = files_of(tmp_path / "out")
    assert found["weight"].dtype == torch.bfloat16
    assert found["running_mean"].dtype == torch.float32


def test_buffers_that_nothing_fills(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(stored(tmp_path, weights()))
    message = one_message(ranks(2).run(all_on_meta, folder))
    assert "the buffer table is on the meta device" in message
    assert "parameters_on_meta" in message


def all_on_meta(rank: int, folder: str) -> str:
    with torch.device("meta"):
        model: Any = Buffered().double()
    spread(model, "exact", 2)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(model, folder)
    return str(caught.value)


def saving_refused(rank: int, folder: str, case: str) -> str:
    model = built(Buffered, "exact", 2, meta=case == "meta")
    if case == "dtype":
        model = built(Buffered, "plain", 2, meta=False).to(torch.complex64)
    if case == "other shapes":
        model = nn.Linear(2, 2 + rank)
    with pytest.raises(CheckpointError) as caught:
        save_safetensors(model, folder if case != "not shared" or rank == 0 else folder + "-own")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("full", "has weights already (model.safetensors); use a new folder"),
        ("meta", "scale is on the meta device and has no values"),
        ("dtype", "which the files cannot have"),
        ("other shapes", "different models with the same name weight"),
        ("not shared", "is not shared"),
    ],
)
def test_saving_is_refused(ranks: Ranks, tmp_path: Path, case: str, words: str) -> None:
    folder = tmp_path / "out"
    if case == "full":
        stored(folder, weights())
    before = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert words in one_message(ranks(2).run(saving_refused, str(folder), case))
    after = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    assert after == before  # no file is left


# Memory.


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    found = cast(re.Match[str], re.search(r"RssAnon:\s+(\d+) kB", status))
    return 1024 * int(found[1])


class Large(nn.Module):
    """Matrices of 16 MB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(8))


def grown(rank: int, folder: str, layout: Any) -> tuple[int, int]:
    """Return by how much the memory grew at most, in bytes, and the size of the shards."""
    with torch.device("meta"):
        model: Any = Large()
    for layer in model.layers:
        fully_shard(layer, mesh_of((2,), ("fsdp",)), layout=layout)
    before, most = anonymous(), 0
    copy = Tensor.copy_

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal most
        result = copy(self, *args, **kwargs)
        most = max(most, anonymous())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "copy_", watched)
        load_safetensors(model, folder)
    assert most > before  # it was watched
    shards = sum(p.to_local().nbytes for p in model.parameters())
    return max(most, anonymous()) - before, shards


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports RssAnon")
@pytest.mark.parametrize("layout", ["exact", "ragged"])
def test_memory_grows_by_the_shards(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    tensors = {f"layers.{n}.weight": torch.randn(2048, 2048) for n in range(8)}
    folder = str(stored(tmp_path, tensors, files=4))
    for most, shards in ranks(2).run(grown, folder, layout):
        assert shards == 8 * 2048 * 2048 * 4 // 2
        assert most < shards + 2 * 8 * 2**20  # two slices of 8 MB
