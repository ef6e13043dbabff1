"""What a module's forward was given, and whether the attention that replaces it can honour that.

A call is bound once and rebuilt once; DTensors in it say what they know of the sequence.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_dtensor import Axis, AxisMesh

from ._errors import InputError, described
from ._layouts import Contiguous, Layout, lengths_of
from ._masks import MaskSpec
from ._mesh import list_ranks

Key = int | str


@dataclass(frozen=True, slots=True)
class Call:
    """Positional arguments under their position, keywords under their name."""

    values: dict[Key, Any]
    parameters: tuple[inspect.Parameter, ...]

    @staticmethod
    def of(
        parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "Call":
        """Return the call of a function with ``parameters``."""
        values: dict[Key, Any] = dict(enumerate(args))
        for name, value in kwargs.items():
            values[name] = value
        return Call(values, tuple(parameters))

    def key(self, position: int, name: str | None) -> Key:
        """Return where an argument was given: at its position, or under its name."""
        if position in self.values:
            return position
        name = self._name(position) if name is None else name
        if name not in self.values:
            called = f" or as {name}=" if name is not None else ""
            raise InputError(f"no argument at position {position}{called} in this call")
        return name

    def option(self, name: str) -> Any:
        """Return what was given as ``name``, else its default, else None."""
        if name in self.values:
            return self.values[name]
        for position, parameter in enumerate(self.parameters):
            if parameter.name == name:
                default = None if parameter.default is parameter.empty else parameter.default
                return self.values.get(position, default)
        return None

    def given(self, name: str) -> Any:
        """Return what was given as ``name``, None where it was not, whatever its default."""
        return self.option(name) if self.gives(name) else None

    def says(self, name: str) -> bool:
        """Return whether ``name`` was given, or has a default."""
        return self.gives(name) or any(
            parameter.name == name and parameter.default is not parameter.empty
            for parameter in self.parameters
        )

    def gives(self, name: str) -> bool:
        """Return whether ``name`` was given, by position or by name."""
        return name in self.values or any(
            parameter.name == name and position in self.values
            for position, parameter in enumerate(self.parameters)
        )

    def names_beside(self, keys: Sequence[Key], known: Sequence[str]) -> list[str]:
        """Return the other arguments that were given something that is not their default."""
        defaults = {p.name: p.default for p in self.parameters}
        others = []
        for key, value in self.values.items():
            name = self._name(key) if isinstance(key, int) else key
            default = defaults.get(name) if name is not None else None
            if key not in keys and name not in known and not _same(value, default):
                others.append(str(key) if name is None else name)
        return others

    def rebuild(self, changes: Mapping[Key, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments with some values replaced."""
        values = {**self.values, **changes}
        args = [value for key, value in values.items() if isinstance(key, int)]
        return args, {key: value for key, value in values.items() if isinstance(key, str)}

    def _name(self, position: int) -> str | None:
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if position < len(self.parameters) and self.parameters[position].kind in named:
            return self.parameters[position].name
        return None


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is its default, or a plain scalar or tuple of them equal to it."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    if isinstance(value, tuple):
        return len(value) == len(default) and all(map(_same, value, default))
    return isinstance(value, (bool, int, float, str)) and value == default


_HONOURED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# What SDPA does not have and context_parallel_attention does, where a call gives it.
_GIVEN = ("dropout_seed", "sinks")
# What SDPA takes by position, and its defaults; is_causal must be said, since a module that hands
# on what it gets may add its own.
_SDPA: dict[str, Any] = {
    "query": inspect.Parameter.empty,
    "key": inspect.Parameter.empty,
    "value": inspect.Parameter.empty,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": inspect.Parameter.empty,
}


def check_replaceable(
    parameters: Sequence[inspect.Parameter],
    qkv_indices: Sequence[int],
    qkv_names: Sequence[str],
    mask: MaskSpec | None,
) -> None:
    """Raise `InputError` for a forward that does something which no call has to ask for."""
    ways_out = "use ulysses_degree=None with Contiguous and no mask, which run the forward itself"
    kinds = {parameter.kind for parameter in parameters}
    told = any(parameter.name == "is_causal" for parameter in parameters)
    if mask is None and not told and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise InputError(
            f"this module's forward has no is_causal, so that nothing tells whether what replaces "
            f"it is to be causal; give the style a mask, MaskSpec(causal=...), or {ways_out}"
        )
    names = [parameter.name for parameter in parameters]
    qkv = [names[i] for i in qkv_indices if i < len(names)]
    if qkv_names and set(qkv_names) <= set(names):
        qkv = list(qkv_names)
    known = (*_HONOURED, *qkv)
    meant = [
        f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
        if parameter.name not in known and _has_meaning(parameter.default)
    ]
    if meant:
        raise InputError(
            f"this module's forward has the defaults {meant}, which have no meaning for the "
            f"attention that replaces it; make them None, False or 0, or {ways_out}"
        )


def check_bare(module: nn.Module) -> None:
    """Raise `InputError` for a module with parameters, which a replaced forward would not use."""
    if names := [name for name, _ in module.named_parameters()]:
        raise InputError(
            f"this module has parameters, {names[:4]}, so that its forward does more than the "
            f"attention that replaces it; give the style a module of the attention alone, call "
            f"context_parallel_attention in the forward, or use ulysses_degree=None with "
            f"Contiguous and no mask, which run the forward itself"
        )


def _has_meaning(default: object) -> bool:
    """Return whether a default asks for something; no tensor is compared, which may hold many."""
    if default is None or default is inspect.Parameter.empty:
        return False
    return bool(default) if isinstance(default, (bool, int, float)) else True


def as_sdpa(
    parameters: Sequence[inspect.Parameter], qkv_indices: Sequence[int]
) -> tuple[inspect.Parameter, ...]:
    """Return ``parameters`` with those of SDPA, from q on, in place of ``*args``.

    A module that hands on what it gets hands it to ``scaled_dot_product_attention``, in whose order
    arguments by position are read; up to the first that the module has a parameter for.
    """
    rest = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    first = qkv_indices[0]
    if rest is None or tuple(qkv_indices) != (first, first + 1, first + 2):
        return tuple(parameters)
    named = {parameter.name for parameter in parameters}
    unnamed = [(f"argument_{i}", inspect.Parameter.empty) for i in range(first)]
    handed_on = []
    for name, default in [*unnamed, *_SDPA.items()][rest:]:
        if name in named:
            break
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        handed_on.append(inspect.Parameter(name, kind, default=default))
    return (*parameters[:rest], *handed_on, *parameters[rest + 1 :])


def check_causal(call: Call, mask: MaskSpec | None) -> None:
    """Raise `InputError` where style and call do not say, or not alike, if attention is causal.

    A default of False says nothing where the style has a mask.
    """
    if mask is not None:
        _check_agrees(call, mask)
        return
    if not call.says("is_causal"):
        raise InputError(
            "this call does not say whether it is causal, and the module hands on what it gets; "
            "pass is_causal=True or False, or give the style a mask, MaskSpec(causal=...)"
        )
    given = call.option("is_causal")
    if type(given) is not bool:
        raise InputError(
            f"is_causal={described(given)} is no bool; pass True or False, or give the style a "
            f"mask, MaskSpec(causal=...)"
        )


def _check_agrees(call: Call, mask: MaskSpec) -> None:
    given = call.option("is_causal")
    if given is None or (given is False and not call.gives("is_causal")):
        return
    if given is not mask.causal:
        raise InputError(
            f"is_causal={described(given)}, but the style has a mask of causal={mask.causal}; call "
            f"with is_causal={mask.causal}, or give the style a mask of MaskSpec(causal="
            f"{not mask.causal})"
        )


def check_others(call: Call, keys: list[Key]) -> None:
    """Raise `InputError` for arguments that only the replaced forward would understand."""
    if others := call.names_beside(keys, (*_HONOURED, *_GIVEN)):
        raise InputError(
            f"arguments {others} have no meaning for the attention that replaces this module's "
            f"forward; leave them out, or use ulysses_degree=None with Contiguous and no mask, "
            f"which run the forward itself"
        )


def check_options(call: Call, runs_inner: bool) -> None:
    """Raise `InputError` for a dense mask, and for dropout that ranks would not share.

    The module's own forward drops weights by the random numbers of its rank; what replaces it needs
    a seed that says which.
    """
    if call.option("attn_mask") is not None:
        raise InputError(
            "attn_mask is a dense mask, which no rank holds whole; use is_causal, or give the "
            "style a MaskSpec, with mask_mod= a function of positions in place of the tensor"
        )
    rate = call.option("dropout_p")
    if rate and (runs_inner or call.given("dropout_seed") is None):
        raise InputError(
            f"dropout_p={rate} is not supported "
            f"{'by the own forward' if runs_inner else 'without a seed that all ranks share'}; use "
            f"dropout_p=0.0, or a dropout_seed= in a call whose forward is replaced"
        )


def check_grouped(call: Call, q_heads: int, kv_heads: int) -> None:
    """Raise `InputError` for a call that says that heads are not grouped where they are.

    ``scaled_dot_product_attention`` refuses them too, but for a single head of keys. A call that
    does not say is served, whatever the default: the module may have added its own.
    """
    told = call.gives("enable_gqa") and call.option("enable_gqa") is False
    if told and kv_heads not in (1, q_heads):
        raise InputError(
            f"enable_gqa=False, but q has {q_heads} heads and k and v have {kv_heads}; call with "
            f"enable_gqa=True, or give q, k and v equally many heads"
        )


def take_local_rows(
    tensors: Sequence[Tensor],
    mesh: AxisMesh,
    seq_dim: int,
    layout: Layout | None,
    seq_len: int | None,
) -> tuple[list[Tensor], int | None]:
    """Return q, k and v as local tensors, and the length of the whole sequence where it is known.

    It is ``seq_len``, or what a DTensor whose mesh holds the ranks of ``mesh`` has. Communicates
    nothing. Raises `InputError`, from what all ranks share, for DTensors whose local shards are not
    whole rows of this rank's stretch of the sequence, and for lengths that contradict each other.
    """
    lengths = [
        x.shape[seq_dim]
        for x in tensors
        if isinstance(x, DTensor) and _is_cut(x, mesh, seq_dim, layout)
    ]
    if len(set(lengths)) > 1:
        raise InputError(
            f"q, k and v are DTensors of {lengths} tokens; cross attention is not supported"
        )
    length = lengths[0] if lengths else seq_len
    if seq_len not in (None, length):
        raise InputError(
            f"seq_len={seq_len} was given to the style, but the DTensors have {length} "
            f"tokens; use seq_len={length} or None"
        )
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors], length


def _is_cut(x: DTensor, mesh: AxisMesh, seq_dim: int, layout: Layout | None) -> bool:
    """Return whether the sequence of ``x`` is sharded over the ranks of ``mesh``.

    Axes with none of its other ranks, as those of the batch or of heads, must leave rows whole.
    """
    ranks = list_ranks(mesh)
    axes = [Axis.of(x.device_mesh, position) for position in range(x.device_mesh.ndim)]
    along = [len(set(axis.ranks) & set(ranks)) > 1 for axis in axes]
    whole = [Replicate(), *(Shard(dim) for dim in range(3) if dim != seq_dim)]
    for axis, cuts, placement in zip(axes, along, x.placements, strict=True):
        if not cuts and axis.size > 1 and placement not in whole:
            raise InputError(
                f"axis {axis.name!r} of a DTensor's mesh is not one of context parallelism and "
                f"must leave rows whole, as one of {whole}, got {placement}; redistribute it"
            )
    if not any(along):
        return len(ranks) == 1
    over = [placement for cuts, placement in zip(along, x.placements, strict=True) if cuts]
    if (
        _find_ranks(x, along) != ranks
        or any(placement != Shard(seq_dim) for placement in over)
        or not isinstance(layout, Contiguous)
    ):
        raise InputError(
            f"a DTensor over the context parallel mesh is sharded on dim {seq_dim} over "
            f"all of its ranks and is Contiguous, got {x.placements} on {x.device_mesh} with "
            f"{layout!r}; redistribute it, or pass local rows"
        )
    sizes = [axis.size for axis, cuts in zip(axes, along, strict=True) if cuts]
    _check_lengths(x.shape[seq_dim], sizes, len(ranks))
    return True


def _find_ranks(x: DTensor, along: Sequence[bool]) -> list[int]:
    """Return the ranks over which some axes of a DTensor's mesh lie, as this rank sees them."""
    here = x.device_mesh.get_coordinate() or [0] * len(along)
    index = tuple(slice(None) if cuts else i for cuts, i in zip(along, here, strict=True))
    ranks: list[int] = x.device_mesh.mesh[index].flatten().tolist()
    return ranks


def _check_lengths(length: int, sizes: Sequence[int], n: int) -> None:
    """Raise unless shards of shards are as long as the stretches over all ``n`` ranks."""
    cut: tuple[int, ...] = (length,)
    for size in sizes:
        cut = tuple(part for held in cut for part in lengths_of(Contiguous().chunks(size, held)))
    if cut != (expected := lengths_of(Contiguous().chunks(n, length))):
        raise InputError(
            f"a DTensor of {length} tokens, sharded over axes of {' x '.join(map(str, sizes))} "
            f"ranks, has local lengths {cut}, where Contiguous gives {expected}; pad it to a "
            f"multiple of {n}, or pass local rows and seq_len"
        )
