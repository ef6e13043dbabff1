"""`save_safetensors`: the positions of all tensors in files, and the writing."""

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_dtensor import RaggedTensor
from hp_dtensor.checkpoint import local_boxes
from hp_dtensor.sources import Piece, Source, SourcePlan, SourceRule, Stored

from .._errors import CheckpointError
from ._common import (
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    SINGLE,
    Target,
    check_states,
    gather,
    library,
    listed,
    on_all_ranks,
    on_first_rank,
    rank_in,
    slices,
    targets_of,
)

DEFAULT_FILE_BYTES = 5 * 10**9


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    sources: SourceRule | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    group: ProcessGroup | None = None,
) -> None:
    """Save the weights of a model that may be sharded as safetensors files.

    Each rank writes the elements that it stores to their place in the files, so no rank ever has a
    whole parameter. Of several replicas the first one writes. The result is one file
    ``model.safetensors``, or several files with an index, as ``from_pretrained`` of transformers
    and `load_safetensors` read them. All ranks of ``group`` must call this function.

    Args:
        model: The model.
        folder: Folder on a file system that all ranks share. It is created if it does not exist.
        sources: A function that chooses other pieces and names for the files, such as
            ``hp_ep.transformers.checkpoint_sources(model)``. Defaults to None: the names of the
            model. A tied parameter is stored once, under its first name.
        dtype: Dtype of floating-point values in the files. Defaults to the dtype of each parameter.
        max_file_bytes: Upper bound on the size of a file in bytes; a larger tensor gets a file of
            its own.
        group: Process group of the ranks that call this function. Defaults to the world.

    Raises:
        CheckpointError: Raised on all ranks if the folder has weights already, if it is not shared
            by all ranks, if a parameter has no values or a dtype that files cannot have, if ranks
            disagree about a shape, or if a file cannot be written. No file is left then.
        ImportError: The package safetensors is missing; ``pip install 'hp-fsdp[safetensors]'``.

    Examples:
        On 2 ranks:

        >>> model = fully_shard(nn.Linear(8, 6), init_device_mesh("cpu", (2,)))
        >>> save_safetensors(model, folder + "/exported", dtype=torch.bfloat16)
    """
    library()
    path = Path(folder)
    targets = targets_of(model)
    held = on_all_ranks(group, lambda: _held(targets, dtype))
    union = _union(group, held)
    plan = on_all_ranks(group, lambda: _saving_plan(model, sources, union, targets))
    files = _files(plan, union, max_file_bytes)
    token = on_first_rank(group, lambda: _begin(path, files))
    try:
        on_all_ranks(group, lambda: _write(targets, plan, union, path, files, token, group))
        on_first_rank(group, lambda: _finish(path, files, token))
    except CheckpointError:
        if rank_in(group) == 0:
            _remove(path, files, token)
        raise


class Held(NamedTuple):
    """One tensor of a rank: its shape, the name of its dtype in files, and whether it is plain."""

    shape: tuple[int, ...]
    dtype: str
    is_plain: bool


def _held(targets: Sequence[Target], dtype: torch.dtype | None) -> dict[str, Held]:
    held = {}
    for target in targets:
        tensor = target.tensor
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if kind not in DTYPE_NAMES:
            raise CheckpointError(
                f"{target.names[0]} has {kind}, which the files cannot have; use dtype= or one of "
                f"{[str(legal) for legal in DTYPE_NAMES]}"
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{target.names[0]} is on the meta device and has no values; load the model first"
            )
        is_plain = not isinstance(tensor, DTensor | RaggedTensor)
        held[target.names[0]] = Held(tuple(tensor.shape), DTYPE_NAMES[kind], is_plain)
    return held


class Union(NamedTuple):
    """The tensors of all ranks by name, and the first rank that has each plain one."""

    tensors: dict[str, Held]
    first_rank: dict[str, int]


def _union(group: ProcessGroup | None, own: Mapping[str, Held]) -> Union:
    union = Union({}, {})
    for rank, held in enumerate(gather(group, dict(own))):
        for name, tensor in held.items():
            known = union.tensors.setdefault(name, tensor)
            union.first_rank.setdefault(name, rank)
            if known != tensor:
                raise CheckpointError(
                    f"{name} is {tensor} on rank {rank} and {known} on rank "
                    f"{union.first_rank[name]}; all ranks must have the same model"
                )
    return union


def _saving_plan(
    model: nn.Module, sources: SourceRule | None, union: Union, targets: Sequence[Target]
) -> SourcePlan:
    shapes = {name: held.shape for name, held in union.tensors.items()}
    if sources is None:
        check_states(model, ())
        return SourcePlan({name: Stored(name) for name in shapes}, shapes)
    plan = sources(None)
    check_states(model, plan.parameters)
    first = {name: target.names[0] for target in targets for name in target.names}
    chosen: dict[str, Source] = {}
    for name, source in plan.parameters.items():
        if first.get(name, name) in shapes:  # other ranks may have names that this one lacks
            chosen.setdefault(first.get(name, name), source)
    same = {name: shape for name, shape in shapes.items() if name not in chosen}
    stored = {**{name: tuple(shape) for name, shape in plan.stored.items()}, **same}
    wrong = [name for name in chosen if chosen[name].shape(stored) != shapes[name]]
    if wrong:
        raise CheckpointError(f"sources makes tensors of other shapes than {listed(wrong)}")
    parameters = {name: chosen.get(name, Stored(name)) for name in shapes}
    used = {name for source in parameters.values() for name in source.names}
    return SourcePlan(parameters, {name: shape for name, shape in stored.items() if name in used})


class Position(NamedTuple):
    """Where a stored tensor is: the file, the dtype there, and the offset of its first byte."""

    file: str
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class Files:
    """The files to write: their headers and sizes in bytes by name, and each tensor's position."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    positions: Mapping[str, Position]


def _files(plan: SourcePlan, union: Union, max_bytes: int) -> Files:
    """Distribute the stored tensors over files, in the order of the plan."""
    dtypes = {
        stored: union.tensors[name].dtype
        for name, source in plan.parameters.items()
        for stored in source.names
    }
    groups: list[dict[str, int]] = [{}]
    for name, shape in plan.stored.items():
        size = math.prod(shape) * DTYPES[dtypes[name]].itemsize
        if groups[-1] and sum(groups[-1].values()) + size > max_bytes:
            groups.append({})
        groups[-1][name] = size
    headers, sizes, positions = {}, {}, {}
    for number, members in enumerate(groups, 1):
        several = f"model-{number:05}-of-{len(groups):05}.safetensors"
        file = SINGLE if len(groups) == 1 else several
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, size in members.items():
            begin, end = end, end + size
            entries[name] = {
                "dtype": dtypes[name],
                "shape": list(plan.stored[name]),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the elements start at a multiple of 8 bytes
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file] = len(headers[file]) + end
        for name in members:
            begin = entries[name]["data_offsets"][0]
            positions[name] = Position(file, dtypes[name], len(headers[file]) + begin)
    return Files(headers, sizes, positions)


def _begin(folder: Path, files: Files) -> str:
    """Create the files with their headers under temporary names; return the names' token."""
    folder.mkdir(parents=True, exist_ok=True)
    present = [path.name for path in folder.glob("*.safetensors")]
    present += [INDEX] if (folder / INDEX).exists() else []
    if present:
        raise CheckpointError(f"{folder} has weights already ({listed(present)}); use a new folder")
    token = f".{uuid.uuid4().hex}.partial"
    for name, header in files.headers.items():
        with (folder / (name + token)).open("wb") as file:
            file.write(header)
            file.truncate(files.sizes[name])
    return token


@torch.no_grad()
def _write(
    targets: Sequence[Target],
    plan: SourcePlan,
    union: Union,
    folder: Path,
    files: Files,
    token: str,
    group: ProcessGroup | None,
) -> None:
    """Write the elements for which this rank is the first replica."""
    for name in files.headers:
        if not (folder / (name + token)).exists():
            raise CheckpointError(
                f"{folder} is not shared: the files that the first rank created there are not seen "
                "by this rank; give a folder on a shared file system"
            )
    by_file: dict[str, list[tuple[Piece, Tensor]]] = {}
    for target in targets:
        name, held = target.names[0], local_boxes(target.tensor)
        is_first = held.is_first_replica
        if union.tensors[name].is_plain:
            is_first = union.first_rank[name] == rank_in(group)
        for box, view in held.boxes if is_first else ():
            for piece in plan.parameters[name].pieces(box, plan.stored):
                part = view[slices(piece.target, box)]
                by_file.setdefault(files.positions[piece.name].file, []).append((piece, part))
    for name, pieces in sorted(by_file.items()):
        descriptor = os.open(folder / (name + token), os.O_WRONLY)
        try:
            for piece, part in pieces:
                _write_piece(
                    descriptor, piece, part, plan.stored[piece.name], files.positions[piece.name]
                )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_piece(
    descriptor: int, piece: Piece, part: Tensor, shape: Sequence[int], position: Position
) -> None:
    """Write one box of a stored tensor, in runs that are contiguous in the file."""
    dtype, box = DTYPES[position.dtype], piece.stored
    values = piece.as_stored(part).to("cpu", dtype).clone(memory_format=torch.contiguous_format)
    content = values.reshape(-1).view(torch.uint8).numpy().data
    inner = len(box)  # dims from here on are whole
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    lead = max(inner - 1, 0)  # a run spans the range of dim `lead`, and all of the dims after it
    strides = [math.prod(shape[dim + 1 :]) * dtype.itemsize for dim in range(len(shape))]
    length = math.prod(hi - lo for lo, hi in box[lead:]) * dtype.itemsize
    starts = product(*(range(*interval) for interval in box[:lead]))
    for number, start in enumerate(starts):
        corner = (*start, *(lo for lo, _ in box[lead:]))
        offset = position.offset + sum(i * s for i, s in zip(corner, strides, strict=True))
        run = content[number * length : (number + 1) * length]
        while run:
            done = os.pwrite(descriptor, run, offset)
            run, offset = run[done:], offset + done


def _finish(folder: Path, files: Files, token: str) -> None:
    """Give the files their names, and write the index if there are several."""
    for name in files.headers:
        os.replace(folder / (name + token), folder / name)
    if len(files.headers) > 1:
        total = sum(files.sizes[name] - len(header) for name, header in files.headers.items())
        located = {name: position.file for name, position in files.positions.items()}
        index = {"metadata": {"total_size": total}, "weight_map": located}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _remove(folder: Path, files: Files, token: str) -> None:
    for name in files.headers:
        for path in (folder / (name + token), folder / name):
            path.unlink(missing_ok=True)
