"""`save_safetensors`: assign each tensor a position in a file, and write its elements."""

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
    Box,
    Target,
    check_extra_states,
    distinct_objects,
    folder_of,
    listed,
    on_all_ranks,
    on_first_rank,
    rank_in,
    safe_open,
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
    """Save the weights of a model, which may be sharded, as safetensors files.

    Each rank writes the elements that it stores directly to the files, so no parameter is gathered.
    If several ranks store the same elements, only the first of them writes. The result is one file
    ``model.safetensors``, or several files with an index. `load_safetensors` and
    ``from_pretrained`` of transformers read both. All ranks of ``group`` must call this function.
    Ranks may have different parts of a model, such as the stages of a pipeline, if the parts have
    different parameter names.

    Args:
        model: The model.
        folder: Folder on a file system that all ranks share. It is created if it does not exist.
        sources: A function that describes the parameters by tensors with other names or shapes,
            which the files then store, such as ``hp_ep.transformers.checkpoint_sources(model)``.
            Defaults to None: the files store the parameters under their names in the model. A tied
            parameter is stored once, under its first name.
        dtype: Dtype of floating-point parameters in the files. Buffers, such as the bias of a
            router, are not converted. Defaults to the dtype of each parameter.
        max_file_bytes: Upper bound on the bytes of all tensors in one file. A larger tensor gets a
            separate file.
        group: Process group of the ranks that call this function. Defaults to the world.

    Raises:
        CheckpointError: Raised on all ranks, and no file is left, if

            - the folder contains weights already, is not shared by all ranks, or is not writable;
            - a parameter is on the meta device, or has a dtype that files do not support;
            - ``sources`` does not provide each stored element exactly once;
            - different ranks use one name for different tensors, or a module has extra state.

        ImportError: The package safetensors is missing; ``pip install 'hp-fsdp[safetensors]'``.

    Examples:
        On 2 ranks:

        >>> model = fully_shard(nn.Linear(8, 6), init_device_mesh("cpu", (2,)))
        >>> save_safetensors(model, folder + "/exported", dtype=torch.bfloat16)
    """
    on_all_ranks(group, safe_open)
    path = on_all_ranks(group, lambda: folder_of(folder))
    targets, part = on_all_ranks(group, lambda: _part(model, sources, dtype, max_file_bytes))
    parts = distinct_objects(group, part)
    saved = on_first_rank(group, lambda: _merged(parts))
    token = on_first_rank(group, lambda: f".{uuid.uuid4().hex}.partial")
    try:
        on_first_rank(group, lambda: _begin(path, saved.files, token))
        on_all_ranks(group, lambda: _write(targets, saved, path, token, rank_in(group)))
        on_first_rank(group, lambda: _finish(path, saved.files, token))
    except CheckpointError:
        if rank_in(group) == 0:
            _remove(path, saved.files, token)
        raise


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor to save.

    Attributes:
        shape: Global shape.
        dtype: Name of the dtype in the files, such as ``"BF16"``.
    """

    shape: tuple[int, ...]
    dtype: str


class Part(NamedTuple):
    """Describes the tensors of one rank. Each rank sends its `Part` to the other ranks.

    Attributes:
        tensors: Shape and dtype of each tensor, by the tensor's first name.
        plan: The sources of the tensors.
        max_file_bytes: Argument of `save_safetensors`.
    """

    tensors: dict[str, TensorInfo]
    plan: SourcePlan
    max_file_bytes: int


def _part(
    model: nn.Module, sources: SourceRule | None, dtype: Any, max_file_bytes: Any
) -> tuple[list[Target], Part]:
    """Check the arguments of `save_safetensors`, and return this rank's tensors and its `Part`."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"dtype={dtype!r} is not a floating-point dtype; use one, such as torch.bfloat16"
        )
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise CheckpointError(
            f"max_file_bytes={max_file_bytes!r} is not a number of bytes; use a positive integer"
        )
    if sources is not None and not callable(sources):
        raise CheckpointError(
            f"sources is of type {type(sources).__name__}; to save, use a function that makes a "
            "SourcePlan, which has the shapes of the stored tensors"
        )
    targets = targets_of(model)
    tensors = {target.names[0]: _info(target, dtype) for target in targets}
    return targets, Part(tensors, _plan(model, sources, targets, tensors), max_file_bytes)


def _info(target: Target, dtype: torch.dtype | None) -> TensorInfo:
    tensor, name = target.tensor, target.names[0]
    converts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    kind = dtype if dtype is not None and converts else tensor.dtype
    if kind not in DTYPE_NAMES:
        raise CheckpointError(
            f"{name} has {kind}, which the files cannot have; use dtype= or one of "
            f"{[str(legal) for legal in DTYPE_NAMES]}"
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"{name} is on the meta device and has no values; load the model first"
        )
    return TensorInfo(tuple(tensor.shape), DTYPE_NAMES[kind])


def _plan(
    model: nn.Module,
    sources: SourceRule | None,
    targets: Sequence[Target],
    tensors: Mapping[str, TensorInfo],
) -> SourcePlan:
    """Return the source of each tensor on this rank, by name.

    A tied tensor has its first name only.

    Raises `CheckpointError` if ``sources`` has unknown names or wrong shapes.
    """
    given = SourcePlan({}, {}) if sources is None else sources(None)
    check_extra_states(model, given.parameters)
    first = {name: target.names[0] for target in targets for name in target.names}
    unknown = [name for name in given.parameters if name not in first]
    if unknown:
        raise CheckpointError(f"sources has names that the model does not have: {listed(unknown)}")
    parameters: dict[str, Source] = {}
    for name, source in given.parameters.items():
        parameters.setdefault(first[name], source)
    same = {name: tensors[name].shape for name in tensors if name not in parameters}
    stored = {**{name: tuple(shape) for name, shape in given.stored.items()}, **same}
    parameters = {name: parameters.get(name, Stored(name)) for name in tensors}
    wrong = [name for name in parameters if parameters[name].shape(stored) != tensors[name].shape]
    if wrong:
        raise CheckpointError(f"sources makes tensors of other shapes than {listed(wrong)}")
    used = {name for source in parameters.values() for name in source.names}
    return SourcePlan(parameters, {name: shape for name, shape in stored.items() if name in used})


class Saved(NamedTuple):
    """The tensors and the files that all ranks save together. It is the same on all ranks.

    Attributes:
        plan: The `Source` of each stored tensor of any rank.
        first_rank: For each tensor of the model, the first rank that has it. If the tensor is not
            distributed, only this rank writes it.
        files: The files to write.
    """

    plan: SourcePlan
    first_rank: dict[str, int]
    files: "Files"


def _merged(parts: Mapping[int, Part]) -> Saved:
    """Merge the `Part` objects of all ranks into one `Saved`.

    ``parts`` is the result of `distinct_objects`: the different `Part` objects, by first rank.

    Raises `CheckpointError` if ranks have different ``max_file_bytes``, if they use one name for
    different tensors, or unless exactly one parameter provides each element of the files.
    """
    tensors: dict[str, TensorInfo] = {}
    parameters: dict[str, Source] = {}
    stored: dict[str, Sequence[int]] = {}
    first_rank: dict[str, int] = {}
    limits = {part.max_file_bytes for part in parts.values()}
    if len(limits) > 1:
        raise CheckpointError(f"ranks have different max_file_bytes: {sorted(limits)}")
    for rank, part in parts.items():
        for name in part.tensors:
            if name in tensors:
                raise CheckpointError(
                    f"ranks {first_rank[name]} and {rank} have different models with the same name "
                    f"{name} ({tensors[name]} and {part.tensors[name]}); all ranks must have the "
                    "same model, or parts of it with different names"
                )
            first_rank[name] = rank
        tensors |= part.tensors
        parameters |= part.plan.parameters
        stored |= part.plan.stored
    plan = SourcePlan(parameters, stored)
    _check_covered(plan, tensors)
    return Saved(plan, first_rank, _files(plan, tensors, limits.pop()))


def _check_covered(plan: SourcePlan, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise `CheckpointError` unless exactly one parameter provides each stored element."""
    boxes: dict[str, dict[str, list[Box]]] = {}
    for name, source in plan.parameters.items():
        whole = tuple((0, length) for length in tensors[name].shape)
        for piece in source.pieces(whole, plan.stored):
            boxes.setdefault(piece.name, {}).setdefault(name, []).append(piece.stored)
    for stored, shape in plan.stored.items():
        by_parameter = boxes.get(stored, {})
        found = [box for several in by_parameter.values() for box in several]
        if found == [tuple((0, length) for length in shape)] or not math.prod(shape):
            continue
        edges = [sorted({0, n, *(e for box in found for e in box[d])}) for d, n in enumerate(shape)]
        places = [{edge: place for place, edge in enumerate(dim)} for dim in edges]
        owners = torch.zeros([len(dim) - 1 for dim in edges], dtype=torch.int32)
        for several in by_parameter.values():
            # Boxes of one parameter may overlap, because replicas of an expert repeat elements.
            mine = torch.zeros_like(owners)
            for box in several:
                mine[
                    tuple(slice(at[lo], at[hi]) for at, (lo, hi) in zip(places, box, strict=True))
                ] = 1
            owners += mine
        if int(owners.min()) != 1 or int(owners.max()) != 1:
            what = "give some elements twice" if int(owners.max()) > 1 else "leave out elements"
            raise CheckpointError(
                f"sources: the parameters {listed([*by_parameter])} {what} of {stored}, which has "
                f"shape {tuple(shape)}; each element must come from one parameter"
            )


class Position(NamedTuple):
    """Position of a stored tensor: file name, dtype, and offset of the first byte in the file."""

    file: str
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class Files:
    """The files to write.

    Attributes:
        headers: Header of each file, by file name.
        sizes: Size of each file in bytes, by file name.
        positions: Position of each stored tensor, by tensor name.
    """

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    positions: Mapping[str, Position]


def _files(plan: SourcePlan, tensors: Mapping[str, TensorInfo], max_bytes: int) -> Files:
    """Distribute the stored tensors over files of at most ``max_bytes``, in the plan's order."""
    dtypes = {
        stored: tensors[name].dtype
        for name, source in plan.parameters.items()
        for stored in source.names
    }
    groups: list[dict[str, int]] = [{}]
    total = 0
    for name, shape in plan.stored.items():
        size = math.prod(shape) * DTYPES[dtypes[name]].itemsize
        if groups[-1] and total + size > max_bytes:
            groups.append({})
            total = 0
        groups[-1][name] = size
        total += size
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


def _begin(folder: Path, files: Files, token: str) -> None:
    """Create the files with headers and final sizes. Their temporary names end with ``token``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_empty(folder)
        for name, header in files.headers.items():
            with (folder / (name + token)).open("wb") as file:
                file.write(header)
                file.truncate(files.sizes[name])
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error


def _check_empty(folder: Path) -> None:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    present += [INDEX] if (folder / INDEX).exists() else []
    if present:
        raise CheckpointError(f"{folder} has weights already ({listed(present)}); use a new folder")


@torch.no_grad()
def _write(targets: Sequence[Target], saved: Saved, folder: Path, token: str, rank: int) -> None:
    """Write the elements that this rank stores, unless an earlier rank stores them, too."""
    plan, files = saved.plan, saved.files
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
        if not isinstance(target.tensor, DTensor | RaggedTensor):
            is_first = saved.first_rank[name] == rank
        for box, view in held.boxes if is_first else ():
            for piece in plan.parameters[name].pieces(box, plan.stored):
                part = view[slices(piece.target, box)]
                by_file.setdefault(files.positions[piece.name].file, []).append((piece, part))
    for name, pieces in sorted(by_file.items()):
        try:
            descriptor = os.open(folder / (name + token), os.O_WRONLY)
            try:
                for piece, part in pieces:
                    shape = plan.stored[piece.name]
                    _write_piece(descriptor, piece, part, shape, files.positions[piece.name])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be written: {error.strerror}") from error


def _write_piece(
    descriptor: int, piece: Piece, part: Tensor, shape: Sequence[int], position: Position
) -> None:
    """Write one box of a stored tensor, one contiguous range of the file at a time.

    ``part`` has the elements of the box as the parameter stores them, for example not transposed
    yet. ``shape`` is the shape of the stored tensor.
    """
    dtype, box = DTYPES[position.dtype], piece.stored
    values = piece.as_stored(part).to("cpu", dtype).clone(memory_format=torch.contiguous_format)
    content = values.reshape(-1).view(torch.uint8).numpy().data
    inner = len(box)  # the box covers all dims from here on completely
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    lead = max(inner - 1, 0)  # a contiguous run covers the box from dim `lead` on
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
    """Rename the files to their final names, and write the index if there are several files."""
    named: list[Path] = []
    try:
        _check_empty(folder)  # another program may have written to the folder
        if len(files.headers) > 1:
            total = sum(files.sizes[name] - len(header) for name, header in files.headers.items())
            located = {name: position.file for name, position in files.positions.items()}
            index = {"metadata": {"total_size": total}, "weight_map": located}
            (folder / (INDEX + token)).write_text(json.dumps(index, indent=2))
        for name in [*files.headers, *([INDEX] if len(files.headers) > 1 else [])]:
            os.replace(folder / (name + token), folder / name)
            named.append(folder / name)
    except OSError as error:
        for path in named:
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error


def _remove(folder: Path, files: Files, token: str) -> None:
    """Remove the files that still have temporary names."""
    for name in [*files.headers, INDEX]:
        (folder / (name + token)).unlink(missing_ok=True)
