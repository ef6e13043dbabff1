"""Which arguments of a module's forward the attention that replaces it can honour."""

import inspect
from collections.abc import Sequence

from ._call import Call, Key
from ._errors import InputError
from ._settings import Settings

_HONOURED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def check_replaceable(parameters: Sequence[inspect.Parameter], settings: Settings) -> None:
    """Raise `InputError` for a forward that does something which no call has to ask for."""
    ways_out = "use ulysses_degree=None with Contiguous and no mask, which run the forward itself"
    if settings.mask is None and all(parameter.name != "is_causal" for parameter in parameters):
        raise InputError(
            f"this module's forward has no is_causal, so that nothing tells whether what replaces "
            f"it is to be causal; give the style a mask, MaskSpec(causal=...), or {ways_out}"
        )
    first = max(settings.qkv_indices) + 1
    meant = [
        f"{parameter.name}={parameter.default!r}"
        for parameter in parameters[first:]
        if parameter.name not in (*_HONOURED, *settings.qkv_kwarg_names)
        and parameter.default is not parameter.empty
        and parameter.default not in (None, False, 0)
    ]
    if meant:
        raise InputError(
            f"this module's forward has the defaults {meant}, which have no meaning for the "
            f"attention that replaces it; make them None, False or 0, or {ways_out}"
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
