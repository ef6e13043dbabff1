"""Context parallelism for models of Hugging Face transformers: `context_parallel`, `shard_batch`.

Attention runs through the registry of attention functions of transformers. The mesh and the other
settings are attributes of the attention modules of one model, so models with different meshes can
exist at the same time. transformers is imported on the first call.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hp_dtensor import AxisMesh, Collectives, TorchCollectives
from hp_dtensor.torch_compat import keep_eager

from ._agreement import (
    BatchHash,
    UnitRanks,
    check_same_batch,
    check_units,
    find_moved,
    find_units,
    hash_batch,
    is_sharded,
)
from ._attention import context_parallel_attention
from ._errors import InputError, described
from ._layouts import (
    Layout,
    Pinned,
    check_size,
    checked_chunks,
    checked_layout,
    lengths_of,
)
from ._masks import MaskSpec, check_mask
from ._mesh import place_of, rank_groups_of
from ._nested import map_tensors
from ._routes import Schedule, check_schedule
from ._sequence import IGNORED, check_local, position_ids, shard_sequence, shift_labels
from .kernels._choose import check_backend_name
from .kernels._interface import AttentionBackend

Model = TypeVar("Model", bound=nn.Module)
Documents = tuple[int, ...] | tuple[tuple[int, ...], ...]  # cu_seqlens

_NAME = __name__  # in the library's registries of attention functions and of masks
_ATTRIBUTE = "_context_parallel"  # of attention modules
_COMPARED = 8  # shapes of batches that a model compares between ranks
_ATTENDED = ("full_attention", "sliding_attention")  # layer types whose attention is known here
_FIXED = {"default", "linear", "llama3", "proportional", "yarn"}  # rotary, of any length
# Losses of heads that read whole sequences: the library names a model's loss by its class.
_OF_SEQUENCES = ("ForSequenceClassification", "ForQuestionAnswering")
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Arguments of attention functions that say more about who sees whom, or what is returned.
_REFUSED = (
    *_FLASH,
    "block_indices",
    "cache",
    "head_mask",
    "indices",
    "output_attentions",
    "position_bias",
    "sinks",
)
# Models given to `context_parallel`, with the ranks of their units of fully_shard, which
# `shard_batch` reads while the units are sharded. Keeps no model, mesh or group alive.
_MODELS: WeakKeyDictionary[nn.Module, UnitRanks] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard:
    """Describes how `shard_batch` has sharded a batch.

    `shard_batch` returns this object as ``sequence_shard``. The model passes it to its attention
    layers.

    Attributes:
        layout: Layout of the sequence.
        mask: Mask with the documents of the batch.
        seq_len: Length of the whole sequence, in tokens.
        last_positions: Largest position id of the whole batch: one int, or one int per axis if the
            position ids have the shape ``[axes, batch, sequence]``.
        counted: True if `shard_batch` created the position ids, False if the batch had them.
        padded: True if the batch has padding at the end of sequences. Only causal layers can then
            run: in a causal layer, tokens do not see the padding after them.
        dropout_seed: Seed for the dropout of attention weights, or None.
        rows: Batch size, in sequences.
        place: ``(number of ranks that share the sequence, index of this rank among them)``, or None
            if unknown.
        hashes: Hashes of the whole batch and of the position ids. Ranks compare them in the first
            forward with each new batch shape. None skips the comparison.

    Examples:
        On 4 ranks:

        >>> mesh, ids = init_device_mesh("cpu", (4,)), torch.arange(64)[None]
        >>> shard = shard_batch({"input_ids": ids}, mesh, Zigzag())["sequence_shard"]
        >>> shard.layout, shard.seq_len
        (Zigzag(), 64)
    """

    layout: Layout
    mask: MaskSpec
    seq_len: int
    last_positions: tuple[int, ...]
    counted: bool
    padded: bool = False
    dropout_seed: int | None = None
    rows: int = 0
    place: tuple[int, int] | None = None
    hashes: BatchHash | None = field(default=None, compare=False, repr=False)


class _NotParallelized(InputError, AttributeError):
    """An `InputError`; an AttributeError too, so that ``hasattr`` answers False."""


class _PartMask:
    """The ``attention_mask`` of one rank's part of a batch, of which nothing can be read.

    Models given to `context_parallel` drop it. Other models would attend to the rows of one rank
    only; they raise when they read it to make their own mask.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NotParallelized(
            "this batch was cut by shard_batch, but this model was not given to context_parallel: "
            "each rank would attend to its own rows only; give the model to context_parallel, or "
            "call it with whole batches. An attention of your own that spans the ranks takes "
            "attention_mask=None"
        )

    def __getitem__(self, _: object) -> NoReturn:
        self.__getattr__("shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerMask:
    """What a model asked of the library's mask of a layer; travels in the place of that mask."""

    causal: bool
    window: int | None

    def __getitem__(self, index: Any) -> "_LayerMask":
        """Return the mask of a model that takes all of its rows, as Gemma 4 does; refuse others."""
        if all(x in (slice(None), slice(0, None)) for x in index):
            return self
        raise _computed("rows or columns")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which others ask for, as copies
            raise AttributeError(name)
        raise _computed(name)


def _computed(part: str) -> InputError:
    return InputError(
        f"this model computes with its mask, of which it takes {part}, instead of handing it to "
        f"the attention as it is; that is not supported over ranks"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An attribute of an attention module: its model's settings, and its number in the model."""

    settings: "_Settings"
    index: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Settings:
    """What `context_parallel` was given, and the shard that the forward under way was given.

    ``attend`` is `context_parallel_attention` with those of its arguments that all layers share.
    """

    attend: Callable[..., Any]
    mesh: AxisMesh
    collectives: Collectives
    layout: Layout
    seq_len: int | None
    place: tuple[int, int]  # the number of ranks that share a sequence, and this rank's place
    compared: set[tuple[int, int]] = field(default_factory=set)  # shapes of batches
    moved: Tensor | None = None  # whether position ids are other ones than those of shard_batch
    trained: bool = False  # the meshes of parameters were checked
    expected: SequenceShard | None = None  # only compared: a recomputation runs after the forward

    @property
    def n(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.place[0]

    def __deepcopy__(self, memo: object) -> "_Settings":
        """Return the settings themselves: a mesh is not copied with a model."""
        return self

    def is_new(self, shard: SequenceShard) -> bool:
        """Return whether ranks compare this batch: it has one of the first 8 new shapes."""
        if self.n == 1 or shard.hashes is None or len(self.compared) >= _COMPARED:
            return False
        return (shard.rows, shard.seq_len) not in self.compared


def context_parallel(
    model: Model,
    mesh: AxisMesh,
    *,
    layout: Layout | None = None,
    ulysses_degree: int = 1,
    schedule: Schedule = "direct",
    backend: str | AttentionBackend = "auto",
    collectives: Collectives | None = None,
    seq_len: int | None = None,
) -> Model:
    """Make the attention of a transformers model span the ranks of a mesh.

    Every attention module that reads the attention registry of transformers calls
    `context_parallel_attention` with these arguments. Each layer keeps its causality, window,
    sinks, soft cap and scale. Call the model with the result of `shard_batch`. This function
    communicates nothing.

    The loss on each rank is a part of the mean loss. Sum the gradients of parameters over the mesh;
    do not average them (hp-fsdp: ``gradient_reduction="sum"``).

    Args:
        model: A ``PreTrainedModel``. It is changed in place.
        mesh: Mesh of the ranks that share a sequence, as for `context_parallel_attention`.
        layout: Layout of `shard_batch`. Defaults to None: `Contiguous`.
        ulysses_degree: As for `context_parallel_attention`. Defaults to 1.
        schedule: As for `context_parallel_attention`. Defaults to ``"direct"``.
        backend: As for `context_parallel_attention`. Defaults to ``"auto"``.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        seq_len: Length of all sequences, in tokens. Defaults to None: the length of each batch.

    Returns:
        ``model``.

    Raises:
        InputError: This function raises the error before communication, on all ranks together, if
            ``model``

            - is not a model of transformers, or was passed to this function before;
            - does not read the attention registry;
            - mixes positions in other ways than by attention (convolutions, recurrences, encoders
              with cross attention);
            - selects or normalizes positions of whole sequences (sequence classification, question
              answering, poolers);
            - computes positions itself (no ``position_ids``, or scores that depend on positions).

            Calls of the model raise the error in the cases of `context_parallel_attention`. If all
            ranks call the model with the same arguments, all raise before communication for:

            - caches, returned attention weights or ``logits_to_keep``;
            - padding in a layer that is not causal;
            - dropout of attention weights without a seed;
            - masks other than full, causal, windowed or packed documents;
            - labels, packed documents or several ranks without `shard_batch`;
            - labels of whole sequences;
            - an attention implementation that was set after this function;
            - auxiliary losses of routers, which average over the tokens of one rank;
            - a model that counts positions from the ``pad_token_id`` on, if `shard_batch` got no
              ``position_ids``.

            Calls of the model raise the error later in these cases:

            - In the first training forward: ``fully_shard`` got a mesh without the ranks of
              ``mesh``.
            - On all ranks, when a new batch shape is compared: ranks have different batches,
              lengths or seeds, ``position_ids`` are not the ones from `shard_batch`, or the batch
              was sharded over another mesh.
            - On all ranks, after the forward: outputs have one or two dims, as from a pooling head.
        BackendError: ``backend`` is unknown or does not support the inputs.

    Examples:
        On 2 ranks, with a model of transformers:

        >>> mesh, ids = init_device_mesh("cpu", (2,)), torch.arange(64)[None]
        >>> model = context_parallel(model, mesh, layout=Zigzag())
        >>> batch = shard_batch({"input_ids": ids, "labels": ids}, mesh, Zigzag())
        >>> loss = model(**batch).loss  # this rank's share of the mean loss
        >>> loss.backward()

    Note:
        - In the first forward of each of the first 8 batch shapes, the model's first attention
          compares a hash of the batch between the ranks: one all-reduce per axis, and the host
          waits for it.
        - The function sets the attention implementation in the text config of the model. Models
          that share the config object raise `InputError` until they are passed to this function
          too.
    """
    library = import_module("transformers")
    collectives = TorchCollectives() if collectives is None else collectives
    layout = checked_layout(layout)
    check_schedule(schedule)
    check_backend_name(backend)
    if seq_len is not None:
        check_size(1, seq_len)
    rank_groups_of(mesh, ulysses_degree, collectives)
    if not isinstance(model, library.PreTrainedModel):
        raise InputError(
            f"model must be a PreTrainedModel of transformers, got {described(model)}; give the "
            f"model inside a wrapper, and for others use ContextParallel"
        )
    _check_mixing(model)
    config = model.config.get_text_config()
    # By their config modules of the library look up their attention.
    readers = filter(_reads_registry, model.modules())
    modules = [x for x in readers if getattr(x, "config", config) is config]
    if not modules:
        raise InputError(
            f"no module of {type(model).__name__} takes its attention from the registry of "
            f"transformers; call context_parallel_attention in the model's own attention"
        )
    parts = [x for x in model.modules() if isinstance(x, library.PreTrainedModel)]
    own_parts = [x for x in parts if x.config.get_text_config() is config]  # not those of images
    _check_heads(own_parts)
    _check_positions(model, parts, modules)
    if any(hasattr(module, _ATTRIBUTE) for module in modules):
        raise InputError(
            f"this {type(model).__name__} was given to context_parallel before; make a new model "
            f"for other options"
        )
    own_positions = any(hasattr(x, "create_position_ids_from_input_ids") for x in model.modules())
    attend = partial(
        context_parallel_attention,
        mesh=mesh,
        ulysses_degree=ulysses_degree,
        schedule=schedule,
        backend=backend,
        collectives=collectives,
    )
    settings = _Settings(
        attend=attend,
        mesh=mesh,
        collectives=collectives,
        layout=layout,
        seq_len=seq_len,
        place=place_of(mesh),
    )
    library.AttentionInterface.register(_NAME, _attention)
    library.AttentionMaskInterface.register(_NAME, _mask)
    config._attn_implementation = _NAME
    for index, module in enumerate(modules):
        setattr(module, _ATTRIBUTE, _Place(settings=settings, index=index))

    def before_part(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        _check_implementation(module)
        args = tuple(None if isinstance(x, _PartMask) else x for x in args)
        kwargs = {key: x for key, x in kwargs.items() if not isinstance(x, _PartMask)}
        shard = kwargs.get("sequence_shard")
        if isinstance(shard, SequenceShard) and settings.expected is None:
            _note_positions(module, args, kwargs, settings, shard)
        return args, kwargs

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs = _checked_call(module, kwargs)
        settings.expected = shard = kwargs.get("sequence_shard")
        given = _arguments_of(module, args, kwargs)
        _check_values(given.get("attention_mask"))
        if shard is not None and module.training and torch.is_grad_enabled():
            _check_reduction(module, settings)
        if isinstance(shard, SequenceShard) and shard.counted and own_positions:
            raise InputError(
                f"{type(module).__name__} counts positions from the pad_token_id on, and "
                f"shard_batch counts from 0; give shard_batch position_ids, those of this model"
            )
        if settings.expected is None:
            _check_alone(module, settings)
            _check_unpacked(module, given)
        elif given.get("position_ids") is None:
            raise InputError(
                f"{type(module).__name__} was called with a sequence_shard, but without its "
                f"position_ids: each rank would count its rows from 0; hand on all that "
                f"shard_batch returns"
            )
        return args, kwargs

    def check(module: nn.Module, _: object, output: object) -> None:
        if settings.expected is not None:
            _check_outputs(module, output)

    def after(*_: object) -> None:
        settings.expected = None

    for part in own_parts:
        part.register_forward_pre_hook(before_part, with_kwargs=True)
    _MODELS[model] = {}
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(check)
    model.register_forward_hook(after, always_call=True)
    for module in model.modules():
        if _is_scaled_rotary(module, config):
            _give_last_position(module, settings)
    return model


def shard_batch(
    batch: Mapping[str, Any],
    mesh: AxisMesh,
    layout: Layout | None = None,
    *,
    mask: MaskSpec | None = None,
    dropout_seed: int | None = None,
) -> dict[str, Any]:
    """Shard a batch for a model that was passed to `context_parallel`.

    Every rank passes the same whole sequences. Communicates nothing.

    - ``input_ids``, ``inputs_embeds``, ``position_ids``, ``labels`` and other tensors
      ``[batch, sequence]`` are sharded along the sequence.
    - If the batch has no ``position_ids``, they are created and count from the start of each
      document.
    - If the batch has ``labels``, the labels of the next tokens are sharded and returned as
      ``shift_labels``, and ``num_items_in_batch`` is set to the number of labels of all ranks. The
      losses of all ranks then add up to the mean loss of the whole batch.
    - If data-parallel ranks or micro-batches share one mean, put their number of labels into the
      batch as ``num_items_in_batch``.

    Args:
        batch: A mapping with ``input_ids`` or ``inputs_embeds``.
        mesh: Mesh of `context_parallel`.
        layout: Layout of `context_parallel`. Layouts that depend on the mask, such as `Greedy`, use
            ``mask`` in all layers. Defaults to None: `Contiguous`.
        mask: Mask whose ``cu_seqlens`` has the packed documents, for all rows of the batch or for
            each of them. Causality and windows are properties of the layers. Defaults to None: the
            documents are taken from the batch, by the first rule that applies:

            - ``cu_seq_lens_q``, as ``DataCollatorWithFlattening`` creates it, has the boundaries.
            - If there is no ``attention_mask``, a document starts where ``position_ids`` return to
              0 or to the first id of their row, as in transformers. In ``position_ids``
              ``[4, batch, sequence]`` (Qwen2-VL), row 0 has the ids of the text.
            - Otherwise each row is one document.
        dropout_seed: Seed for models with dropout of attention weights: an int of at least 0, equal
            on the ranks of a sequence. Use another seed for every step and batch. Defaults to None.

    Returns:
        A new dictionary with this rank's part of the batch and a `SequenceShard` as
        ``sequence_shard``. On several ranks, ``attention_mask`` is an object that models passed to
        `context_parallel` drop. Any other model that reads this object raises `InputError`.

    Raises:
        InputError: Raised in the cases of `shard_sequence`. Also raised on all ranks, if they pass
            equal arguments, for:

            - a batch with neither or both of ``input_ids`` and ``inputs_embeds``, with tensors of
              unknown shape (images), with DTensors, or with fewer tokens than ranks;
            - an ``attention_mask`` with zeros before ones or with values other than 0 and 1;
            - labels of whole sequences, or labels of padding;
            - if neither ``mask`` nor ``attention_mask`` is given: ``position_ids`` that jump,
              repeat or decrease at a position where no document starts;
            - if neither is given: ``position_ids`` ``[axes, batch, sequence]`` that start again and
              have no row of the text;
            - a ``mask`` with a window or a function, with other documents than the batch has, or
              with documents for another number of rows;
            - a ``dropout_seed`` that is not an int of at least 0.

    Examples:
        On 4 ranks:

        >>> mesh, ids = init_device_mesh("cpu", (4,)), torch.arange(64)[None]
        >>> batch = shard_batch({"input_ids": ids, "labels": ids}, mesh, Zigzag())
        >>> batch["input_ids"].shape
        torch.Size([1, 16])
    """
    n, rank = place_of(mesh)
    layout = checked_layout(layout)
    rest = {key: x for key, x in _checked_mapping(batch).items() if x is not None}
    if "sequence_shard" in rest:
        raise InputError(
            "the batch has a sequence_shard: shard_batch cut it before; give the whole sequences"
        )
    rows, seq_len = _size_of(rest)
    if dropout_seed is not None and (type(dropout_seed) is not int or dropout_seed < 0):
        raise InputError(f"dropout_seed={described(dropout_seed)} is no int of at least 0")
    mask = _mask_of(rest, mask)
    if mask.per_row and len(mask.ends) != rows:
        raise InputError(
            f"the mask has the documents of {len(mask.ends)} rows, but the batch has {rows}; give "
            f"one tuple of cu_seqlens for each row, or one for all of them"
        )
    pinned = Pinned(layout, mask)
    lengths = lengths_of(checked_chunks(pinned, n, seq_len, mask))
    if min(lengths) < 1:
        raise InputError(
            f"{layout!r} gives {n} ranks {list(lengths)} of {seq_len} tokens, and a model needs at "
            f"least one; pad the sequence, or use fewer ranks"
        )
    padding = _padding_of(rest.pop("attention_mask", None), rows, seq_len)
    if (labels := rest.get("labels")) is not None:
        _check_labels(labels)
        _check_rows("labels", labels, rows, seq_len)
        targets = rest.setdefault("shift_labels", shift_labels(labels, mask))
        _check_rows("shift_labels", targets, rows, seq_len)
        labelled = targets != IGNORED
        if padding is not None and bool((labelled & padding.to(labelled.device)).any()):
            raise InputError(
                f"padding has labels, whose loss would be another than without; make labels "
                f"{IGNORED} where the attention_mask is 0"
            )
        rest.setdefault("num_items_in_batch", labelled.sum().clamp_(min=1))
    dims = {key: _dim_of(key, value, rows, seq_len) for key, value in rest.items()}
    cut = {key: rest[key] for key, dim in dims.items() if dim is not None}
    found = shard_sequence(cut, mesh, pinned, {key: dims[key] for key in cut}, mask)
    counted = "position_ids" not in rest
    if counted:
        device = next(iter(cut.values())).device
        positions = position_ids(mesh, pinned, seq_len, mask, device=device)
        found["position_ids"] = positions if mask.per_row else positions[None]
        longest = max(len(x) for row in mask.rows for x in row.documents(seq_len))
        last_positions = (longest - 1,)
    else:
        ids = rest["position_ids"]
        axes = ids if ids.ndim == 3 else ids[None]
        last_positions = tuple(axes.flatten(1).amax(1).tolist())
    shard = SequenceShard(
        layout=layout,
        mask=mask,
        seq_len=seq_len,
        last_positions=last_positions,
        counted=counted,
        padded=padding is not None,
        dropout_seed=dropout_seed,
        rows=rows,
        place=(n, rank),
        hashes=hash_batch(
            [cut[key] for key in sorted(cut)],
            hash((mask.causal, mask.ends, -1 if dropout_seed is None else dropout_seed)),
            found["position_ids"],
        ),
    )
    for known in _MODELS.keyrefs():
        model = known()
        if model is not None and not _MODELS.get(model) and is_sharded(model):
            _MODELS[model] = find_units(model)
    whole = {} if n == 1 else {"attention_mask": _PartMask()}
    return {**rest, **found, **whole, "sequence_shard": shard}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as the library calls its attention functions: ``[batch, heads, rows, size]``."""
    place = getattr(module, _ATTRIBUTE, None)
    if not isinstance(place, _Place):
        raise InputError(
            f"this {type(module).__name__} belongs to no model given to context_parallel, but "
            f"shares its config; make it with a config of its own"
        )
    settings = place.settings
    if settings.expected is not None and settings.expected != sequence_shard:
        raise InputError(
            f"{type(module).__name__} was called without the sequence_shard that its model was "
            f"called with: the model does not hand keyword arguments on to its attention"
        )
    if given := [x for x in _REFUSED if others.get(x) is not None and others[x] is not False]:
        raise InputError(
            f"{type(module).__name__} gives its attention {', '.join(given)}, which is not "
            f"supported over ranks; packed documents are the mask of shard_batch"
        )
    if query.shape[2] != key.shape[2]:
        raise InputError(
            f"{query.shape[2]} queries and {key.shape[2]} keys are from cross attention or a "
            f"cache, which are not supported over ranks; call the model with use_cache=False"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    layer = _layer_mask(module, attention_mask, causal, sliding_window)
    shard = _shard_of(module, settings, sequence_shard)
    if shard is not None and shard.padded and not layer.causal:
        raise InputError(
            f"{type(module).__name__} is not causal and sees padding; leave out the padding, or "
            f"pack the sequences as documents of one row"
        )
    cut = MaskSpec(causal=True) if shard is None else shard.mask
    if layer.causal and not cut.causal:
        raise InputError(
            f"{type(module).__name__} is causal, but shard_batch was given a mask of causal=False, "
            f"which it does not follow; give it causal=True"
        )
    seed = _seed_of(place, shard, dropout)
    if shard is not None and settings.is_new(shard):
        _compare(settings, shard, query.device)
    out = settings.attend(
        query,
        key,
        value,
        mask=MaskSpec(causal=layer.causal, window=layer.window, cu_seqlens=cut.cu_seqlens),
        layout=Pinned(settings.layout, cut),
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout,
        dropout_seed=seed,
        seq_len=settings.seq_len if shard is None else shard.seq_len,
    )
    return out.transpose(1, 2), None


def _mask(
    *args: object,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> _LayerMask:
    """Return what the library's function for a layer's mask was asked for; makes no dense mask.

    Functions of indices are refused: of the library's own, those of blocks that see their own later
    rows, and of a model, all. Documents, which the library finds in position ids, are looked for by
    `shard_batch`: local position ids start anew at a cut too.
    """
    if use_vmap or mask_function.__qualname__.startswith("or_masks."):
        raise InputError(
            "this model masks by a function of its own, as for images or bidirectional parts, "
            "which is not supported over ranks"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError(
            "the attention_mask has zeros; give it to shard_batch, which takes padding at the end "
            "of rows, or pack the sequences as documents of one row"
        )
    causal = "allow_is_bidirectional_skip" not in others
    return _LayerMask(causal=causal, window=local_size)


def _layer_mask(
    module: nn.Module, given: object, causal: bool, sliding_window: int | None
) -> _LayerMask:
    """Return the mask of one layer: what the model's mask and the call say, which must agree."""
    if given is None:
        return _LayerMask(causal=causal, window=sliding_window)
    if not isinstance(given, _LayerMask):
        raise InputError(
            f"{type(module).__name__} was given a dense mask, {described(given)}, which is not "
            f"supported over ranks; use causal masks, windows and packed documents"
        )
    if given.causal != causal:
        raise InputError(
            f"{type(module).__name__} calls its attention with is_causal={causal} and a mask of "
            f"causal={given.causal}; give the model one of the two"
        )
    if given.window is not None and not given.causal:
        raise InputError(
            f"{type(module).__name__} has a window over both sides, which is not supported over "
            f"ranks; its reach differs between attention functions of transformers"
        )
    if given.window != sliding_window:
        raise InputError(
            f"{type(module).__name__} calls its attention with sliding_window={sliding_window} and "
            f"a mask of {given.window} local positions; chunks and other local masks are not "
            f"supported over ranks"
        )
    return given


def _seed_of(place: _Place, shard: SequenceShard | None, dropout: float) -> int | None:
    """Return the seed of one layer's dropout: no two layers or seeds below 2**43 have one."""
    if dropout == 0.0:
        return None
    if shard is None or shard.dropout_seed is None:
        raise InputError(
            f"the model has attention dropout {dropout} in training, for which all ranks need one "
            f"seed; give shard_batch a dropout_seed, as the number of the step, or set the "
            f"config's attention dropout to 0"
        )
    return (shard.dropout_seed * 2**20 + place.index) % 2**63


def _check_alone(module: nn.Module, settings: _Settings) -> None:
    """Raise `InputError` for a call without a shard where ranks hold parts of a sequence."""
    if settings.n > 1:
        raise InputError(
            f"{type(module).__name__} was called without a sequence_shard, and ranks hold parts of "
            f"a sequence; call it with what shard_batch returns. Generation is not supported over "
            f"ranks"
        )


def _shard_of(
    module: nn.Module, settings: _Settings, shard: SequenceShard | None
) -> SequenceShard | None:
    if shard is None:
        _check_alone(module, settings)  # a part of the model was called, or it drops the shard
        return None
    if shard.layout != settings.layout:
        raise InputError(
            f"shard_batch cut the sequence by {shard.layout!r}, but context_parallel was given "
            f"{settings.layout!r}; give both the same layout"
        )
    if settings.seq_len not in (None, shard.seq_len):
        raise InputError(
            f"shard_batch cut {shard.seq_len} tokens, but context_parallel was given "
            f"seq_len={settings.seq_len}; leave it out where lengths differ"
        )
    return shard


def _checked_call(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call without a cache, or raise for what is unsupported."""
    config: Any = model.config
    text = config.get_text_config()
    for name in ("output_attentions", "use_cache", "past_key_values"):
        asked = kwargs.get(name)
        if name == "output_attentions" and asked is None:
            asked = config.output_attentions or text.output_attentions
        if asked is not None and asked is not False:
            raise InputError(
                f"{name} is not supported over ranks, which hold parts of a sequence; leave it out"
            )
    kept = kwargs.get("logits_to_keep", 0)
    if kwargs.get("sequence_shard") is not None and not (isinstance(kept, int) and kept == 0):
        raise InputError(
            "logits_to_keep counts rows of the whole sequence, of which ranks hold parts; leave it "
            "out, and take rows of what unshard_sequence returns"
        )
    forward = _forward_of(model)
    if kwargs.get("labels") is not None:
        _check_loss(model, forward, kwargs)
        routed = kwargs.get("output_router_logits")
        if getattr(text, "output_router_logits", False) if routed is None else routed:
            raise InputError(
                "output_router_logits adds an auxiliary loss to the loss, of one rank's tokens: "
                "ranks' shares would not sum to that of the batch; call parallelize_experts of "
                "hp-ep, with token_axes, before context_parallel and not after it, or set "
                "output_router_logits=False"
            )
    if "use_cache" in inspect.signature(forward).parameters:
        return {**kwargs, "use_cache": False}
    return kwargs


@keep_eager  # it reads values, and changes the settings
def _compare(settings: _Settings, shard: SequenceShard, device: torch.device) -> None:
    """Raise `InputError` on every rank unless ranks that share a sequence have the same batch."""
    if shard.hashes is None:
        return
    shape = shard.rows, shard.seq_len
    check_same_batch(
        settings.mesh,
        settings.collectives,
        shape,
        shard.hashes.batch,
        moved=settings.moved,
        misplaced=shard.place not in (None, settings.place),
        device=device,
    )
    settings.compared.add(shape)  # not before: a batch that is given again raises again


def _note_positions(
    model: nn.Module, args: Any, kwargs: dict[str, Any], settings: _Settings, shard: SequenceShard
) -> None:
    """Note whether a call of a new shape has other position ids than `shard_batch` returned."""
    settings.moved = None
    if shard.hashes is not None and settings.is_new(shard):
        given = _arguments_of(model, args, kwargs).get("position_ids")
        settings.moved = find_moved(shard.hashes, given)


def _check_reduction(model: nn.Module, settings: _Settings) -> None:
    """Raise `InputError` if units of ``fully_shard`` are not sharded over the ranks of a sequence.

    Runs once, in the first training forward. Units that are unsharded by then, such as the model's
    own, were recorded by `shard_batch`.
    """
    if settings.n > 1 and not settings.trained:
        check_units({**_MODELS.get(model, {}), **find_units(model)}, settings.mesh)
        settings.trained = True


def _check_implementation(model: nn.Module) -> None:
    """Raise `InputError` where the attention was set to one of the rows of a rank."""
    config: Any = model.config
    found = config.get_text_config()._attn_implementation
    if found != _NAME:
        raise InputError(
            f"the attention of this {type(model).__name__} was set to {found!r} after "
            f"context_parallel, so that each rank would attend to its own rows only; set it back "
            f"with model.set_attn_implementation({_NAME!r}), or make a new model"
        )


def _arguments_of(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    bound = inspect.signature(_forward_of(model)).bind_partial(model, *args, **kwargs)
    return {**bound.arguments, **kwargs}


def _check_unpacked(model: nn.Module, given: dict[str, Any]) -> None:
    """Raise `InputError` where position ids tell documents, which `shard_batch` alone hands on."""
    if given.get("attention_mask") is None and _documents_of(given.get("position_ids")):
        raise InputError(
            f"{type(model).__name__} was called with position_ids of packed documents, but without "
            f"a sequence_shard, which tells the attention where they end; call it with what "
            f"shard_batch returns"
        )


def _check_loss(model: nn.Module, forward: Any, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` unless the loss of a model is this rank's share of the mean."""
    needed = ("shift_labels", "num_items_in_batch")
    _check_labels(kwargs["labels"])
    if any(kwargs.get(name) is None for name in needed):
        raise InputError(
            "labels need shift_labels and num_items_in_batch, as the label after a rank's last row "
            "is another rank's; cut the batch with shard_batch"
        )
    taken = "loss_function" in forward.__code__.co_names
    loss: Any = model.loss_function
    if not taken or not {*needed} <= inspect.signature(loss).parameters.keys():
        raise InputError(
            f"the loss of {type(model).__name__} takes no {' and '.join(needed)}; call it without "
            f"labels, and use cp_loss"
        )


def _check_labels(labels: object) -> None:
    """Raise `InputError` for labels of whole sequences."""
    if isinstance(labels, Tensor) and labels.ndim == 1:
        raise InputError(
            f"labels of shape {tuple(labels.shape)} are one for each sequence, of which ranks hold "
            f"parts; leave them out, and compute their loss from the whole rows that "
            f"unshard_sequence returns"
        )


def _check_mixing(model: nn.Module) -> None:
    """Raise `InputError` for models in which rows meet elsewhere than in self-attention."""
    config: Any = model.config
    encoder = config.is_encoder_decoder  # which may have two text configs
    kinds = () if encoder else getattr(config.get_text_config(), "layer_types", None) or ()
    found = sorted(set(kinds).difference(_ATTENDED))
    stateful = any(getattr(x, "_is_stateful", False) for x in model.modules())
    found += ["recurrent layers"] if stateful else []
    found += ["an encoder"] if encoder else []
    convolutions = (nn.Conv1d, nn.ConvTranspose1d)
    found += ["convolutions"] if any(isinstance(x, convolutions) for x in model.modules()) else []
    if found:
        raise InputError(
            f"{type(model).__name__} has {', '.join(found)}, which mix the rows of a sequence "
            f"beside {' and '.join(_ATTENDED)}; each rank would mix its own rows only"
        )


def _check_heads(parts: list[Any]) -> None:
    """Raise `InputError` for models that select or normalise rows of whole sequences."""
    for part in parts:
        if part.loss_type in _OF_SEQUENCES:
            raise InputError(
                f"{type(part).__name__} selects or normalises rows of whole sequences, of which "
                f"ranks hold parts; give context_parallel its base model "
                f"(.{part.base_model_prefix}), and apply the head to what unshard_sequence returns "
                f"of the base model's last_hidden_state"
            )
    for part in parts:
        if getattr(part, "pooler", None) is not None:
            raise InputError(
                f"{type(part).__name__} has a pooler, which selects rows of whole sequences, of "
                f"which ranks hold parts; make it with add_pooling_layer=False, or set its pooler "
                f"to None, and pool what unshard_sequence returns of its last_hidden_state"
            )


def _check_outputs(model: nn.Module, output: object) -> None:
    """Raise `InputError` for outputs that have no row for each token, as those of a pooling head.

    Such an output has one or two dims, on all ranks alike.
    """
    named: Any = output.items() if isinstance(output, Mapping) else None
    if named is None:
        each = output if isinstance(output, (list, tuple)) else [output]
        named = [("output", x) for x in each]
    for name, x in named:
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim in (1, 2):
            raise InputError(
                f"{type(model).__name__} returned {name} of shape {tuple(x.shape)}, but ranks hold "
                f"parts of a sequence, and outputs are [batch, rows, size]: a head that selects or "
                f"normalises rows needs the whole sequence; give context_parallel the model "
                f"without this head, and apply it to what unshard_sequence returns"
            )


def _check_positions(model: nn.Module, parts: list[nn.Module], attention: list[nn.Module]) -> None:
    """Raise `InputError` for models that number the rows they are given themselves."""
    remedy = "each rank would count its rows from 0; call context_parallel_attention in the model"
    if not any("position_ids" in inspect.signature(_forward_of(x)).parameters for x in parts):
        raise InputError(f"{type(model).__name__} takes no position_ids: {remedy}")
    if any("arange" in _names_in(x) for x in attention):
        raise InputError(
            f"{type(attention[0]).__name__} counts rows itself, as to scale scores by position: "
            f"{remedy}"
        )


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names_in(module: nn.Module) -> tuple[str, ...]:
    """Return the names that a module's own forward reads."""
    code = getattr(_forward_of(module), "__code__", None)
    return () if code is None else code.co_names


def _reads_registry(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in _names_in(module)


def _is_scaled_rotary(module: nn.Module, config: Any) -> bool:
    """Return whether frequencies of a rotary embedding may follow the largest position id."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None or type(getattr(module, "config", config)) is not type(config):  # as of images
        return False
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return "max" in _names_in(module) or not _FIXED.issuperset(kinds)


def _give_last_position(rotary: nn.Module, settings: _Settings) -> None:
    """Let a rotary embedding see the whole sequence's last position behind this rank's."""
    parameters = inspect.signature(rotary.forward)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        shard = settings.expected
        if shard is None:
            if settings.n == 1:
                return None
            raise InputError(
                f"{type(module).__name__} scales rotary embeddings by the length of the sequence, "
                f"which it cannot know outside of the forward of the model that was given to "
                f"context_parallel; call that model, and do not recompute this module"
            )
        call = parameters.bind(*args, **kwargs)
        positions = call.arguments["position_ids"]
        axes = len(positions) if positions.ndim == 3 else len(shard.last_positions)
        last = max(shard.last_positions[-axes:])  # without the text's, which image models drop
        call.arguments["position_ids"] = nn.functional.pad(positions, (0, 1), value=last)
        return call.args, call.kwargs

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if settings.expected is None:
            return None
        return map_tensors(lambda x: x[..., :-1, :], output)

    rotary.register_forward_pre_hook(before, with_kwargs=True)
    rotary.register_forward_hook(after, with_kwargs=True)


def _checked_mapping(batch: object) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise InputError(
            f"batch must be a mapping of a model's arguments, got {described(batch)}; use "
            f"dict(input_ids=..., labels=...)"
        )
    return batch


def _size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and of tokens."""
    given = [key for key in ("input_ids", "inputs_embeds") if key in batch]
    if len(given) != 1:
        raise InputError(f"a batch has input_ids or inputs_embeds, got {given or sorted(batch)}")
    x, dims = batch[given[0]], 2 if given == ["input_ids"] else 3
    check_local(given[0], x)
    if not isinstance(x, Tensor) or x.ndim != dims:
        shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else described(x)
        raise InputError(
            f"{given[0]} must be a tensor of {dims} dims, batch and sequence first, got {shape}"
        )
    return x.shape[0], x.shape[1]


def _check_rows(name: str, x: object, rows: int, seq_len: int) -> None:
    if not isinstance(x, Tensor) or tuple(x.shape) != (rows, seq_len):
        shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else described(x)
        raise InputError(f"{name} must be a tensor [{rows}, {seq_len}] as the inputs, got {shape}")


def _mask_of(batch: dict[str, Any], mask: MaskSpec | None) -> MaskSpec:
    """Return the mask that was given, or that of the documents in a batch; drop flash's lengths."""
    ends, *_ = [batch.pop(key, None) for key in _FLASH]
    told = None if ends is None else tuple(torch.as_tensor(ends).tolist())
    if mask is None and told is not None:
        return MaskSpec(causal=True, cu_seqlens=told)
    # Beside an attention_mask the library does not look for documents in position ids.
    looks = told is None and batch.get("attention_mask") is None
    if mask is None:
        ids = batch.get("position_ids") if looks else None
        return MaskSpec(causal=True, cu_seqlens=_documents_of(ids))
    check_mask(mask)
    if mask.mask_mod is not None or mask.window is not None:
        raise InputError(
            f"shard_batch was given a mask with {'a window' if mask.window else 'a mask_mod'}, but "
            f"windows are those of the model's layers, and masks by functions are not supported "
            f"in models of transformers; give MaskSpec(causal=True, cu_seqlens=...)"
        )
    if told is not None and mask.ends != (told,):
        raise InputError(
            "the mask has other documents than cu_seq_lens_q of the batch; leave out one of the two"
        )
    found = _starts_of(batch.get("position_ids")) if looks and not mask.ends else None
    if found is not None and bool((found[0] & found[1]).any()):
        raise InputError(
            "the mask has no documents, but position_ids of the batch start anew; leave out the "
            "mask for theirs, or give it cu_seqlens, (0, length) for a single document"
        )
    return mask


def _starts_of(positions: object) -> tuple[Tensor, Tensor] | None:
    """Return two bool tensors ``[batch, sequence - 1]`` about all position ids but the first.

    The first tensor: the id is not the previous one plus 1. The second: a document may start here.
    It may if the id is the smallest of its row, and is 0 or the row's first id. The library does
    not agree with itself: its masks start a document at every id that does not follow the previous
    one, its flash attention at every smallest id. A start must satisfy both.

    Ids of text are ``[sequence]``, ``[batch, sequence]``, or row 0 of ``[4, batch, sequence]``,
    whose other rows are time, height and width of images. In other ids of three dims a document
    may start where all axes may.
    """
    if not isinstance(positions, Tensor) or positions.ndim not in (1, 2, 3):
        return None
    axes = positions[(None,) * (3 - positions.ndim)]
    axes = axes[:1] if len(axes) == 4 else axes
    least = axes.amin(-1, keepdim=True)
    starts = ((axes == least) & ((least == 0) | (least == axes[..., :1]))).all(0)
    return (axes.diff(dim=-1) != 1).any(0), starts[:, 1:]


def _documents_of(positions: Any) -> Documents | None:
    """Return the documents that the library finds in position ids, if any.

    Raises `InputError` if it is ambiguous whether a document starts at some id.
    """
    found = _starts_of(positions)
    if found is None or not bool(found[0].any()):
        return None
    anew, starts = found
    size = positions.shape[-1]
    remedy = (
        f"give shard_batch the documents, mask=MaskSpec(causal=True, cu_seqlens=...), (0, {size}) "
        f"for a single one, or an attention_mask of ones, beside which there are none"
    )
    if positions.ndim == 3 and len(positions) != 4:
        if len(again := starts.nonzero()):
            row, column = again[0].tolist()
            raise InputError(
                f"position_ids of shape {tuple(positions.shape)} start again at token {column + 1} "
                f"of row {row}, but transformers looks for documents in [batch, sequence] and in "
                f"row 0 of [4, batch, sequence] only; put the positions of the text in front, or "
                f"{remedy}"
            )
        return None
    if len(unclear := (anew & ~starts).nonzero()):
        row, column = unclear[0].tolist()
        before, then = positions[(None,) * (3 - positions.ndim)][0, row, column:][:2].tolist()
        raise InputError(
            f"position_ids of row {row} go from {before} to {then} at token {column + 1}, from "
            f"which transformers itself does not tell in one way whether a document starts there: "
            f"one starts at 0, or where its row starts; {remedy}"
        )
    if bool((anew == anew[:1]).all()):
        anew = anew[:1]
    ends = tuple((0, *(row.nonzero()[:, 0] + 1).tolist(), size) for row in anew)
    return ends[0] if len(ends) == 1 else ends


def _check_values(attention_mask: object) -> None:
    """Raise `InputError` for an ``attention_mask`` of other values than 0 and 1."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return
    others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if others.numel():
        raise InputError(
            f"the attention_mask has the value {others[0].item()}, but its values are 0 for "
            f"padding and 1 for tokens; transformers reads any other as 1. If they number packed "
            f"documents, leave the mask out and give shard_batch position_ids that start at 0 in "
            f"each document, or mask=MaskSpec(causal=True, cu_seqlens=...)"
        )


def _padding_of(given: object, rows: int, seq_len: int) -> Tensor | None:
    """Return which tokens are padding, at the end of rows; None where there is none."""
    if given is None:
        return None
    _check_rows("attention_mask", given, rows, seq_len)
    _check_values(given)
    seen = torch.as_tensor(given).bool()
    if bool(seen.all()):
        return None
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise InputError(
            "the attention_mask has zeros before ones; pad rows at their end, or pack the "
            "sequences as documents of one row"
        )
    return ~seen


def _dim_of(key: str, value: Any, rows: int, seq_len: int) -> int | None:
    """Return the dim along which a value of a batch is cut, None where it is handed on."""
    if not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            raise InputError(f"{key} is {described(value)}; make it a tensor, [batch, sequence]")
        return None
    check_local(key, value)
    if key == "inputs_embeds":
        return 1
    if key == "position_ids" and value.ndim and value.shape[-1] == seq_len:
        return value.ndim - 1
    if tuple(value.shape) == (rows, seq_len):
        return 1
    if value.ndim == 0:
        return None
    raise InputError(
        f"{key} of shape {tuple(value.shape)} is not [{rows}, {seq_len}], so that it is not known "
        f"along which dim to shard it; leave it out, or cut it with shard_sequence afterwards"
    )


__all__ = ["SequenceShard", "context_parallel", "shard_batch"]
