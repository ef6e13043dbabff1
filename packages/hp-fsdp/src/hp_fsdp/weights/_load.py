"""`load_safetensors`: read the headers of the files, compare them with the model, and load."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_dtensor import LayoutError, RaggedTensor
from hp_dtensor.checkpoint import local_boxes
from hp_dtensor.sources import Piece, Source, SourcePlan, SourceRule, Stored

from .._errors import CheckpointError
from .._torch import materialize
from ._common import (
    DTYPES,
    INDEX,
    LISTED,
    SINGLE,
    Target,
    check_extra_states,
    distinct_objects,
    folder_of,
    listed,
    on_all_ranks,
    on_first_rank,
    plain_name,
    safe_open,
    slices,
    targets_of,
)

SAMPLE = 4096  # number of bytes in each file that ranks compare
LFS_POINTER = b"version https://git-lfs"


class StoredTensor(NamedTuple):
    """File name, shape and dtype of one tensor, from the header of a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Read(NamedTuple):
    """One read from a file: a box of a stored tensor, and its destination.

    Attributes:
        piece: The box of a stored tensor.
        view: The elements of a parameter on this rank that correspond to ``piece``.
        tie: If None, the stored elements are copied into ``view``. If a text, ``view`` was loaded
            already under another name of a tied parameter, and the stored elements must equal
            ``view``. The text has both names, such as ``"head.weight and embed.weight"``, for an
            error message.
    """

    piece: Piece
    view: Tensor
    tie: str | None


def load_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    sources: Mapping[str, Source] | SourceRule | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Load weights from safetensors files into a model, in place. The model may be sharded.

    Each rank reads only the elements that it stores, directly into its shards. Parameters may be
    sharded by `fully_shard` in either layout, by tensor parallelism and by expert parallelism, or
    may be plain tensors. Persistent buffers are loaded, too. Values are converted to the dtype of
    the parameter. All ranks of ``group`` must call this function.

    The folder has either one file ``model.safetensors``, or several files and
    ``model.safetensors.index.json``, as ``save_pretrained`` of transformers writes them.

    Args:
        model: The model. Parameters on the meta device get memory.
        folder: Folder with the files. All ranks must read the same files.
        sources: Describes parameters that the files store under other names or in other shapes: a
            mapping from parameter names to `hp_dtensor.sources.Source`, or a function that returns
            a `SourcePlan`, such as ``hp_ep.transformers.checkpoint_sources(model)``. All other
            parameters have the same name in the files as in the model. Defaults to None.
        device: Device for parameters that are on the meta device. Defaults to the device of the
            mesh of the model's DTensors, or to the CPU if the model has no DTensors.
        group: Process group of the ranks that call this function. Defaults to the world.

    Raises:
        CheckpointError: Raised on all ranks, before the model is changed, if

            - a file or the index is missing, damaged, or does not match the other files;
            - ranks read files with different sizes or with different bytes in the middle;
            - the files lack a parameter of the model, or the model lacks a tensor of the files;
            - shapes differ, or stored values are quantized;
            - a buffer on the meta device is not in the files, so it would have no values.

            Raised after the model is changed if reading fails, or if the files store different
            values under two names of a tied parameter.
        ImportError: The package safetensors is missing; ``pip install 'hp-fsdp[safetensors]'``.

    Examples:
        On 2 ranks:

        >>> mesh, linear = init_device_mesh("cpu", (2,)), nn.Linear(8, 6)
        >>> save_safetensors(linear, folder + "/linear")
        >>> with parameters_on_meta():
        ...     model = nn.Linear(8, 6)
        >>> model = fully_shard(model, mesh)
        >>> load_safetensors(model, folder + "/linear")
        >>> torch.equal(model.weight.full_tensor(), linear.weight)
        True

    Note:
        Files are memory-mapped, one at a time, so a rank needs no memory beyond its shards. The
        mapping counts towards a limit on the address space (``RLIMIT_AS``).

        Create the optimizer after this call, because plain parameters on the meta device may be
        replaced.
    """
    opened = on_all_ranks(group, safe_open)
    path = on_all_ranks(group, lambda: folder_of(folder))
    found = on_first_rank(group, lambda: _read_catalogue(path, opened))
    samples = distinct_objects(group, on_all_ranks(group, lambda: _sample(path, found)))
    _raise_different_folders(samples, path)
    plan, problems, memory = on_all_ranks(group, lambda: _check(model, sources, found, device))
    ties = hasattr(model, "tie_weights")
    _raise_problems(distinct_objects(group, problems), path, set(found) - plan.ignored, ties)
    on_all_ranks(group, lambda: materialize(model, memory))
    on_all_ranks(group, lambda: _read(targets_of(model), plan, found, path, opened))


def _read_catalogue(folder: Path, opened: Any) -> dict[str, StoredTensor]:
    """Return all stored tensors of a folder by name, from the headers of the files.

    ``opened`` is ``safetensors.safe_open``. Raises `CheckpointError` if the files are incomplete.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give one with safetensors files")
    index = folder / INDEX
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.exists():
        located = _read_index(index)
        files = sorted(set(located.values()))
    elif SINGLE in files:
        files = [SINGLE]
    elif len(files) != 1:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files ({listed(files) or 'none'}) and no "
            f"{INDEX}; it must have one file, or several files and the index"
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _read_header(folder / file, opened):
            if name in found:
                raise CheckpointError(f"{name} is in {found[name].file} and in {file} of {folder}")
            found[name] = stored
    if index.exists():
        wrong = sorted(n for n, file in located.items() if n not in found or found[n].file != file)
        if wrong:
            raise CheckpointError(
                f"{index} names files that lack these tensors: {listed(wrong)}; the folder is "
                "incomplete or its index is damaged"
            )
        extra = sorted(set(found) - set(located))
        if extra:
            raise CheckpointError(f"{index} lacks tensors that its files have: {listed(extra)}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    located: Any = content.get("weight_map") if isinstance(content, dict) else None
    fits = isinstance(located, dict) and located
    names = [*located.values()] if fits else [None]
    if not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
        raise CheckpointError(
            f"{path} has no weight_map from tensor names to names of files in its folder"
        )
    return dict(located)


def _read_header(path: Path, opened: Any) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with opened(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                yield name, StoredTensor(path.name, tuple(part.get_shape()), part.get_dtype())
    except Exception as error:
        raise CheckpointError(f"{path} {_damage(path, error)}") from error


def _damage(path: Path, error: Exception) -> str:
    """Return the reason why a file cannot be read, such as ``"is missing"``."""
    if not path.exists():
        return "is missing"
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as unreadable:
        return f"cannot be read: {unreadable.strerror}"
    return "is a pointer of Git LFS; run git lfs pull" if is_pointer else f"is damaged ({error})"


def _sample(folder: Path, found: Mapping[str, StoredTensor]) -> str:
    """Return a digest of the name, the size and a block in the middle of each file."""
    digest = sha256()
    for name in sorted({stored.file for stored in found.values()}):
        path = folder / name
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(size // 2)
                digest.update(f"{name} {size};".encode() + file.read(SAMPLE))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _raise_different_folders(samples: Mapping[int, str], folder: Path) -> None:
    """Raise `CheckpointError` if ranks read different files.

    ``samples`` maps the first rank with each different result of `_sample` to this result. It is
    equal on all ranks, so all ranks raise.
    """
    if len(samples) > 1:
        ranks = ", ".join(map(str, samples))
        raise CheckpointError(
            f"ranks {ranks} see different files in {folder}; all ranks must read the same weights"
        )


def _check(
    model: nn.Module,
    sources: Mapping[str, Source] | SourceRule | None,
    found: Mapping[str, StoredTensor],
    device: torch.device | str | None,
) -> "tuple[SourcePlan, Problems, torch.device]":
    """Compare the files with the model on this rank.

    Returns the source of each parameter, the differences between files and model, and the device
    for parameters on the meta device.
    """
    targets = targets_of(model)
    plan = _plan(model, sources, {name: stored.shape for name, stored in found.items()}, targets)
    problems = _problems(targets, plan, found)
    problems.wrong.extend(_without_values(model, targets))
    return plan, problems, _device_of(targets, device)


def _plan(
    model: nn.Module,
    sources: Mapping[str, Source] | SourceRule | None,
    shapes: Mapping[str, tuple[int, ...]],
    targets: Sequence[Target],
) -> SourcePlan:
    """Return the source of each name in the model.

    The source of a name is its entry in ``sources``. If there is no entry, the source is the stored
    tensor with this name. A name without either has no source in the result. Raises
    `CheckpointError` if ``sources`` is invalid.
    """
    given = SourcePlan({}, shapes)
    if isinstance(sources, Mapping):
        own = {name for target in targets for name in target.names}
        unknown = sorted(set(sources) - own)
        if unknown:
            raise CheckpointError(
                f"sources has names that the model does not have: {listed(unknown)}"
            )
        for name, source in sources.items():
            if not isinstance(source, Source):
                raise CheckpointError(
                    f"sources[{name!r}] is of type {type(source).__name__}; use a Source of "
                    "hp_dtensor.sources, such as Stored(name)"
                )
        given = SourcePlan(sources, shapes)
    elif callable(sources):
        given = sources(shapes)
    elif sources is not None:
        raise CheckpointError(
            f"sources is of type {type(sources).__name__}; use a mapping from names to sources, or "
            "a function that makes a SourcePlan"
        )
    check_extra_states(model, given.parameters)
    same = {
        name: Stored(name)
        for target in targets
        for name in target.names
        if name in shapes and name not in given.parameters
    }
    return SourcePlan({**same, **given.parameters}, shapes, given.ignored)


class Problems(NamedTuple):
    """Differences between the files and the model of one rank.

    Attributes:
        missing: Names of parameters and buffers that the files lack.
        wrong: Error texts about shapes, dtypes and buffers.
        used: Names of stored tensors that the model uses.
    """

    missing: list[str]
    wrong: list[str]
    used: list[str]


def _problems(
    targets: Sequence[Target], plan: SourcePlan, found: Mapping[str, StoredTensor]
) -> Problems:
    """Compare names, shapes and dtypes of this rank's tensors with the files."""
    missing: list[str] = []
    wrong: list[str] = []
    used: list[str] = []
    for target in targets:
        sources = {n: plan.parameters[n] for n in target.names if n in plan.parameters}
        absent = {n: [s for s in source.names if s not in found] for n, source in sources.items()}
        if not sources or any(absent.values()):
            lacking = [name for names in absent.values() for name in names]
            made = f" (made of {listed(lacking)})" if lacking else ""
            missing.append(target.names[0] + made)
            continue
        for name, source in sources.items():
            used += source.names
            wrong += _mismatches(name, target.tensor, source, plan, found)
    return Problems(missing, wrong, used)


def _without_values(model: nn.Module, targets: Sequence[Target]) -> Iterator[str]:
    """Yield an error text for each buffer on the meta device that weight files do not contain."""
    filled = {name for target in targets for name in target.names}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and plain_name(name) not in filled:
            yield (
                f"the buffer {name} is on the meta device and is not in files (persistent=False); "
                "build the model in hp_fsdp.parameters_on_meta(), which leaves buffers alone"
            )


def _mismatches(
    name: str,
    tensor: Tensor,
    source: Source,
    plan: SourcePlan,
    found: Mapping[str, StoredTensor],
) -> Iterator[str]:
    for stored in source.names:
        kind, dtype = found[stored].dtype, DTYPES.get(found[stored].dtype)
        if dtype is None or (tensor.is_floating_point() and not dtype.is_floating_point):
            yield (
                f"{stored} is stored as {kind}, which cannot be loaded into {name} of "
                f"{tensor.dtype}; dequantize a quantized checkpoint first"
            )
        elif dtype != tensor.dtype and not tensor.is_floating_point():
            yield f"{stored} is stored as {kind} for {name} of {tensor.dtype}"
    try:
        shape = source.shape(plan.stored)
    except LayoutError as error:
        yield f"{name}: {error}"
        return
    if shape != tuple(tensor.shape):
        yield f"{name} has shape {tuple(tensor.shape)}, and {shape} in the files"


def _raise_problems(
    by_rank: Mapping[int, Problems], folder: Path, stored: set[str], ties: bool
) -> None:
    """Raise one `CheckpointError` that lists the problems of all ranks, if there are any.

    ``stored``: names of the tensors in the files, except ignored ones. Those that no rank uses are
    a problem. ``ties``: whether the model has a
    method ``tie_weights``, which the message then suggests.
    """
    every = by_rank.values()
    missing = sorted({name for each in every for name in each.missing})
    wrong = list(dict.fromkeys(text for each in every for text in each.wrong))
    # A stored tensor may be used by one stage of a pipeline only.
    unexpected = sorted(stored.difference(*(each.used for each in every)))
    parts = [f"missing in the files: {listed(missing)}"] if missing else []
    parts += [f"not in the model: {listed(unexpected)}"] if unexpected else []
    parts += [f"{'; '.join(wrong[:LISTED])}"] if wrong else []
    if parts:
        raise CheckpointError(
            f"the weights in {folder} do not fit the model: {'; '.join(parts)}"
            + ("; sources= maps names that differ" if missing or unexpected else "")
            + ("; call tie_weights() if missing parameters are tied" if missing and ties else "")
        )


def _device_of(targets: Sequence[Target], device: torch.device | str | None) -> torch.device:
    """Return ``device``, or by default the device of the first DTensor's mesh.

    Returns the CPU if ``device`` is None and the model has no DTensor.
    """
    if device is not None:
        return torch.device(device)
    for target in targets:
        if isinstance(target.tensor, DTensor | RaggedTensor):
            kind = target.tensor.device_mesh.device_type
            if kind == "cpu":
                break
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


@torch.no_grad()
def _read(
    targets: Sequence[Target],
    plan: SourcePlan,
    found: Mapping[str, StoredTensor],
    folder: Path,
    opened: Any,
) -> None:
    """Read the elements that this rank stores, one file at a time, into ``targets``."""
    by_file: dict[str, list[Read]] = {}
    for target in targets:
        names = [name for name in target.names if name in plan.parameters]
        for name in names:
            for box, view in local_boxes(target.tensor).boxes:
                for piece in plan.parameters[name].pieces(box, plan.stored):
                    part = view[slices(piece.target, box)]
                    tie = None if name == names[0] else f"{names[0]} and {name}"
                    by_file.setdefault(found[piece.name].file, []).append(Read(piece, part, tie))
    # The second name of a tied parameter is compared after the first name was read.
    for compared in (False, True):
        for name, reads in sorted(by_file.items()):
            chosen = [read for read in reads if (read.tie is not None) == compared]
            if chosen:
                _read_file(folder / name, chosen, opened)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether all elements are equal. NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _read_file(path: Path, reads: Sequence[Read], opened: Any) -> None:
    try:
        with opened(path, framework="pt") as file:
            for piece, view, tie in reads:
                stored = file.get_slice(piece.name)[slices(piece.stored)]
                values = piece.as_target(stored)
                if tie is None:
                    view.copy_(values)
                elif not _same(view, values.to(view)):
                    raise CheckpointError(
                        f"{tie} are one tied parameter of the model, but {path} has "
                        "other values for the second name; untie the parameters, or ignore a name "
                        "with sources="
                    )
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
