"""The sources of a model's weights in checkpoint files: `checkpoint_sources`, `expert_sources`.

transformers converts published checkpoints while it loads them: it renames tensors, stacks experts
and concatenates projections. `checkpoint_sources` runs these conversions on tensors without memory
that record each operation as a `Source`. Any box can be read from a `Source`.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hp_dtensor.sources import (
    Concatenate,
    Reorder,
    Slice,
    Source,
    SourcePlan,
    SourceRule,
    Stack,
    Stored,
    Transpose,
)

from ._errors import ExpertConfigError
from ._experts import GroupedExperts
from ._library import transformers_library
from ._torch import name_in_state

Shapes = Mapping[str, Sequence[int]]
_LISTED = 8  # names that an error lists
# Buffers that older checkpoints have and newer models compute.
_COMPUTED_BUFFERS = ("rotary_emb.inv_freq", "position_ids")


def expert_sources(model: nn.Module) -> SourceRule:
    """Return the sources of layers whose experts have a `Placement`, for safetensors files.

    With a `Placement`, expert weights have one entry along dim 0 per slot. In the files they have
    one entry per expert, in the order of the experts, so that any other placement can load them.
    Layers without a `Placement` need no sources.

    Args:
        model: A model after `parallelize_experts`.

    Returns:
        A function for the argument ``sources`` of ``hp_fsdp.load_safetensors`` and
        ``save_safetensors``.

    Examples:
        On 2 ranks:

        >>> mesh, layer = init_device_mesh("cpu", (2,)), MoE(16, 32, num_experts=4, top_k=2)
        >>> placement = Placement(num_ranks=2, num_experts=4, experts=(3, 1, 2, 0))
        >>> style = ExpertParallel(token_axes=mesh, placement=placement)
        >>> names = parallelize_experts(layer, mesh, style)
        >>> expert_sources(layer)(None).parameters["experts.down_proj"].indices
        (3, 1, 2, 0)

    Note:
        To save: ``hp_fsdp.save_safetensors(model, folder, sources=expert_sources(model))``.
    """

    def rule(shapes: Shapes | None) -> SourcePlan:
        parameters: dict[str, Source] = {}
        stored: dict[str, Sequence[int]] = {}
        for layer, experts in model.named_modules():
            if not isinstance(experts, GroupedExperts) or experts.replicas is None:
                continue
            placement = experts.replicas.placement
            for short, parameter in experts.named_parameters(recurse=False):
                name = name_in_state(model, f"{layer}.{short}" if layer else short)
                parameters[name] = Reorder(Stored(name), placement.experts)
                stored[name] = (placement.num_experts, *parameter.shape[1:])
        return SourcePlan(parameters, stored if shapes is None else shapes)

    return rule


class _Recorded(Tensor):
    """A tensor without memory that records from which stored tensors it is made."""

    source: Source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        record = _RECORDERS.get(func.__name__)
        if record is not None:
            record(result, *args, **(kwargs or {}))
        elif _contains_tensor(result):
            raise _Unreadable(func.__name__)
        return result  # if not recorded: a shape, a dtype or a length


class _Unreadable(Exception):
    """A conversion uses an operation that cannot be read in slices."""


def _recorded(name: str, shape: Sequence[int]) -> _Recorded:
    """Return the record of a stored tensor."""
    tensor = torch.empty(tuple(shape), device="meta").as_subclass(_Recorded)
    tensor.source = Stored(name)
    return tensor


def _contains_tensor(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_contains_tensor, value))
    return isinstance(value, Tensor)


def _positive(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def _stack(result: _Recorded, tensors: Sequence[_Recorded], dim: int = 0) -> None:
    parts = [tensor.source for tensor in tensors]
    result.source = Stack(parts, _positive(dim, result.ndim))


def _cat(result: _Recorded, tensors: Sequence[_Recorded], dim: int = 0) -> None:
    parts = [tensor.source for tensor in tensors]
    result.source = Concatenate(parts, _positive(dim, result.ndim))


def _split(
    results: Sequence[_Recorded], tensor: _Recorded, sizes: object = None, dim: int = 0, **_: object
) -> None:
    at, end = _positive(dim, tensor.ndim), 0
    for result in results:
        begin, end = end, end + result.shape[at]
        result.source = Slice(tensor.source, at, begin, end)


def _transpose(result: _Recorded, tensor: _Recorded, dim0: int = 0, dim1: int = 1) -> None:
    dims = _positive(dim0, result.ndim), _positive(dim1, result.ndim)
    result.source = Transpose(tensor.source, *dims)


def _same(result: _Recorded, tensor: _Recorded, *args: object, **kwargs: object) -> None:
    result.source = tensor.source


_RECORDERS: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "cat": _cat,
    "concat": _cat,
    "chunk": _split,
    "split": _split,
    "transpose": _transpose,
    "contiguous": _same,
    "detach": _same,
    "clone": _same,
}
"""How each operation of torch changes the source of its result."""


def checkpoint_sources(model: nn.Module) -> SourceRule:
    """Return the sources of a transformers model in published checkpoints.

    The checkpoints are in the format of ``save_pretrained``: experts one by one or stacked,
    projections separate or concatenated, names with or without the prefix of the base model. The
    function uses the conversions of the installed transformers.

    Args:
        model: A ``PreTrainedModel``, before or after it was parallelized or sharded.

    Returns:
        A function for the argument ``sources`` of ``hp_fsdp.load_safetensors`` and
        ``save_safetensors``. It raises `ExpertConfigError`, with the names, for a checkpoint with a
        conversion that cannot be read in slices, and for a quantized model.

    Raises:
        ImportError: transformers is missing or older than 5.23.
        ExpertConfigError: The model is not a ``PreTrainedModel``.

    Examples:
        With a model of transformers:

        >>> plan = checkpoint_sources(model)(None)
        >>> plan.parameters["model.layers.0.mlp.experts.down_proj"].names[:2]
        ('model.layers.0.block_sparse_moe.experts.0.w2.weight',
         'model.layers.0.block_sparse_moe.experts.1.w2.weight')

    Note:
        To load: ``hp_fsdp.load_safetensors(model, folder, sources=checkpoint_sources(model))``.
    """
    library, _ = transformers_library()
    if not isinstance(model, library.PreTrainedModel):
        raise ExpertConfigError(
            f"model must be a PreTrainedModel of transformers, got a {type(model).__name__}; other "
            "models need no sources, or a mapping from parameter names to hp_dtensor.sources"
        )
    unsharded = _without_memory(model, library.PreTrainedModel)

    def rule(shapes: Shapes | None) -> SourcePlan:
        chosen = _published(unsharded) if shapes is None else shapes
        parameters = _sources(unsharded, chosen)
        used = {name for source in parameters.values() for name in source.names}
        return SourcePlan(parameters, chosen, _ignored(unsharded, set(chosen) - used))

    return rule


def _without_memory(model: Any, base: type) -> Any:
    """Return an unsharded copy of a model on the meta device.

    transformers finds conversions by the name of the class, which `fully_shard` changes.
    """
    classes = [cls for cls in type(model).__mro__ if issubclass(cls, base)]
    kind: Any = next(cls for cls in classes if not issubclass(cls, FSDPModule))
    if getattr(model.config, "quantization_config", None) is not None:
        raise ExpertConfigError(
            f"this {kind.__name__} has a quantization_config; load an unquantized checkpoint, or "
            "remove quantization_config from the config if its weights were dequantized"
        )
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # save_pretrained leaves a string there
    with torch.device("meta"):
        return kind(config)


def _published(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that ``save_pretrained`` would store."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    found = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def _sources(model: Any, shapes: Shapes) -> dict[str, Source]:
    """Return the source of each parameter, by running transformers' conversions on a record."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Source] = {}
    to_convert: dict[str, Any] = {}
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:  # the conversion is not for this checkpoint
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state:
            continue
        if pattern is None:
            found[renamed] = Stored(name)
            continue
        converter = to_convert.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
        converter.add_tensor(renamed, name, pattern, _recorded(name, shapes[name]))
    unreadable: list[str] = []
    for target, converter in to_convert.items():
        names = sorted(converter.layer_targets[target], key=dot_natural_key)
        try:
            made = converter.convert(target, model=model, config=model.config)
        except _Unreadable as error:
            unreadable.append(f"{target} (made of {_listed(names)} by {error})")
            continue
        for name, tensor in made.items():
            value = tensor[0] if isinstance(tensor, list) else tensor
            found[name] = cast(_Recorded, value).source
    if unreadable:
        raise ExpertConfigError(
            f"this checkpoint of a {type(model).__name__} needs conversions that cannot be read in "
            f"slices: {_listed(unreadable)}; load it with from_pretrained and save it with "
            "save_pretrained(..., save_original_format=False), then load that folder"
        )
    return found


def _ignored(model: Any, unused: Iterable[str]) -> frozenset[str]:
    """Return the unused names that transformers ignores for this model, too."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    patterns += [re.escape(name) + "$" for name in _COMPUTED_BUFFERS]
    return frozenset(n for n in unused if any(re.search(pattern, n) for pattern in patterns))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
