"""Which arguments of a module's forward the attention that replaces it can honour."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ._call import Call, Key
from ._errors import InputError, described
from ._masks import MaskSpec
from ._settings import Settings

_HONOURED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
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


def check_replaceable(parameters: Sequence[inspect.Parameter], settings: Settings) -> None:
    """Raise `InputError` for a forward that does something which no call has to ask for."""
    ways_out = "use ulysses_degree=None with Contiguous and no mask, which run the forward itself"
    kinds = {parameter.kind for parameter in parameters}
    told = any(parameter.name == "is_causal" for parameter in parameters)
    if settings.mask is None and not told and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise InputError(
            f"this module's forward has no is_causal, so that nothing tells whether what replaces "
            f"it is to be causal; give the style a mask, MaskSpec(causal=...), or {ways_out}"
        )
    known = (*_HONOURED, *_names_of_qkv(parameters, settings))
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


def _names_of_qkv(parameters: Sequence[inspect.Parameter], settings: Settings) -> list[str]:
    """Return the parameters that take q, k and v: those named, else those at the positions."""
    names = [parameter.name for parameter in parameters]
    if settings.qkv_kwarg_names and set(settings.qkv_kwarg_names) <= set(names):
        return list(settings.qkv_kwarg_names)
    return [names[i] for i in settings.qkv_indices if i < len(names)]


def _has_meaning(default: object) -> bool:
    """Return whether a default asks for something; no tensor is compared, which may hold many."""
    if default is None or default is inspect.Parameter.empty:
        return False
    return bool(default) if isinstance(default, (bool, int, float)) else True


def as_sdpa(
    parameters: Sequence[inspect.Parameter], settings: Settings
) -> tuple[inspect.Parameter, ...]:
    """Return ``parameters`` with those of SDPA, from q on, in place of ``*args``.

    A module that hands on what it gets hands it to ``scaled_dot_product_attention``, in whose order
    arguments by position are read; up to the first that the module has a parameter for.
    """
    rest = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    first = settings.qkv_indices[0]
    if rest is None or tuple(settings.qkv_indices) != (first, first + 1, first + 2):
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


def check_causal(call: Call, settings: Settings) -> None:
    """Raise `InputError` where style and call do not say, or not alike, if attention is causal.

    A default of False says nothing where the style has a mask.
    """
    if settings.mask is not None:
        _check_agrees(call, settings.mask)
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
    if others := call.names_beside(keys, _HONOURED):
        raise InputError(
            f"arguments {others} have no meaning for the attention that replaces this module's "
            f"forward; leave them out, or use ulysses_degree=None with Contiguous and no mask, "
            f"which run the forward itself"
        )


def check_options(call: Call) -> None:
    """Raise `InputError` for a dense mask or dropout."""
    if call.option("attn_mask") is not None:
        raise InputError(
            "attn_mask is a dense mask, which no rank holds whole; use is_causal or a MaskSpec"
        )
    if call.option("dropout_p"):
        raise InputError(
            f"dropout_p={call.option('dropout_p')} is not supported under context parallelism; "
            f"use dropout_p=0.0"
        )
