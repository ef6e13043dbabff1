"""What a context parallel module runs in place of its forward."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hp_dtensor import AxisMesh, Collectives

from ._call import Call, Key
from ._errors import InputError
from ._heads import heads_to_rows, rows_to_heads
from ._inputs import as_autocast, from_batch_first, plan_inputs, to_batch_first
from ._masks import MaskSpec
from ._planned import exchange_of, planned_attention
from ._seats import Seats, seats_of
from .backends._choose import choose_backend
from .backends._interface import AttentionBackend
from .layouts._fixed import Contiguous
from .layouts._interface import Layout
from .plans._plan import AttentionPlan
from .plans._routes import Schedule

_HONOURED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a `ContextParallel` style was made with; see there."""

    seq_dim: int
    head_dim: int
    qkv_indices: tuple[int, int, int]
    qkv_kwarg_names: tuple[str, ...]
    load_balance: bool
    schedule: Schedule
    layout: Layout
    mask: MaskSpec | None
    backend: str | AttentionBackend
    seq_len: int | None
    collectives: Collectives


class ContextParallelForward:
    """A module's forward over the ranks of a mesh; keeps nothing between calls."""

    def __init__(
        self, inner: Callable[..., Any], mesh: AxisMesh, n: int, degree: int, settings: Settings
    ) -> None:
        """Take the place of ``inner`` on ``n`` ranks.

        Raises `InputError` where ``inner`` will not run and what it computes cannot be told from
        its parameters.
        """
        functools.update_wrapper(self, inner)
        self._inner = inner
        self._parameters = tuple(inspect.signature(inner).parameters.values())
        self._mesh = mesh
        self._ulysses_degree = degree
        self._settings = settings
        in_order = degree == n and isinstance(settings.layout, Contiguous)
        self._runs_inner = in_order and settings.mask is None
        if not self._runs_inner:
            _check_replaceable(self._parameters, settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, with this rank's rows of the attention."""
        settings = self._settings
        call = Call.of(self._parameters, args, kwargs)
        names = settings.qkv_kwarg_names or (None, None, None)
        keys = [call.key(i, name) for i, name in zip(settings.qkv_indices, names, strict=True)]
        q, k, v = (call.values[key] for key in keys)
        seq_len = self._whole_length(q)
        q, k, v = (self._local(x) for x in (q, k, v))
        _check_options(call)
        seats = seats_of(self._mesh, self._ulysses_degree, settings.collectives)
        if not self._runs_inner:
            _check_others(call, keys)
            q, k, v = (as_autocast(x) for x in (q, k, v))
        mask = settings.mask or MaskSpec(causal=bool(call.option("is_causal")))
        plan = self._planned(q, k, v, seats, mask, seq_len)
        if self._runs_inner:
            return self._exchange_around_inner(call, keys, [q, k, v], plan, seats)
        kernel = choose_backend(settings.backend, plan.kernels, q.device, q.dtype, plan.head_size)
        dims = (settings.seq_dim, settings.head_dim)
        q, k, v = (to_batch_first(x, *dims) for x in (q, k, v))
        out = planned_attention(q, k, v, plan, seats, kernel, call.option("scale"))
        return from_batch_first(out, *dims)

    def _planned(
        self, q: Tensor, k: Tensor, v: Tensor, seats: Seats, mask: MaskSpec, seq_len: int | None
    ) -> AttentionPlan:
        settings = self._settings
        return plan_inputs(
            q,
            k,
            v,
            seats.n,
            seats.rank,
            mask=mask,
            layout=settings.layout,
            ulysses_degree=self._ulysses_degree,
            schedule=settings.schedule,
            seq_dim=settings.seq_dim,
            head_dim=settings.head_dim,
            seq_len=seq_len,
            keep_kv=None,
            load_balance=settings.load_balance,
        )

    def _exchange_around_inner(
        self, call: Call, keys: list[Key], qkv: list[Tensor], plan: AttentionPlan, seats: Seats
    ) -> Any:
        settings = self._settings
        dims = (settings.seq_dim, settings.head_dim)
        exchange = exchange_of(plan, seats)
        q, k, v = (to_batch_first(x, *dims) for x in qkv)
        q, k, v = rows_to_heads(q, k, v, exchange)
        repeats = exchange.shares[seats.inside.index].repeats
        if repeats is not None:  # the module groups heads evenly, which these do not
            k, v = (x[:, list(repeats)] for x in (k, v))
        whole = [from_batch_first(x, *dims) for x in (q, k, v)]
        args, kwargs = call.rebuild(dict(zip(keys, whole, strict=True)))
        result = self._inner(*args, **kwargs)

        def has_rows(value: Any) -> bool:
            return isinstance(value, Tensor) and value.shape == whole[0].shape

        if not any(map(has_rows, result if isinstance(result, (tuple, list)) else [result])):
            raise InputError(
                f"the module returned {_describe(result)}, and nothing shaped like the q that it "
                f"got, {tuple(whole[0].shape)}; return the attention of that shape, alone or in a "
                f"tuple or list, or use ulysses_degree=1"
            )

        def back(value: Any) -> Any:
            if not has_rows(value):
                return value
            x = to_batch_first(value, *dims)
            return from_batch_first(heads_to_rows(x, exchange), *dims)

        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*map(back, result))
        if isinstance(result, (tuple, list)):
            return type(result)(map(back, result))
        return back(result)

    def _whole_length(self, q: Tensor) -> int | None:
        """Return the length of the whole sequence where the style or a DTensor says it."""
        given = self._settings.seq_len
        if not self._is_cut(q):
            return given
        length = q.shape[self._settings.seq_dim]
        if given not in (None, length):
            raise InputError(
                f"seq_len={given} was given to the style, but q is a DTensor of {length} tokens; "
                f"use seq_len={length} or None"
            )
        return length

    def _is_cut(self, x: Tensor) -> bool:
        """Return whether ``x`` is a DTensor whose sequence lies over this mesh."""
        if not isinstance(x, DTensor) or x.device_mesh != self._mesh:
            return False
        sharded = all(placement.is_shard(self._settings.seq_dim) for placement in x.placements)
        if not sharded or not isinstance(self._settings.layout, Contiguous):
            raise InputError(
                f"a DTensor over the context parallel mesh is sharded on dim "
                f"{self._settings.seq_dim} and lies Contiguous, got {x.placements} with "
                f"{self._settings.layout!r}; redistribute it, or pass local rows"
            )
        return True

    def _local(self, x: Tensor) -> Tensor:
        self._is_cut(x)
        return x.to_local() if isinstance(x, DTensor) else x


def _describe(result: Any) -> str:
    """Return the shapes of what a forward returned, and the types of what is no tensor."""
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of [{', '.join(map(_describe, result))}]"
    return f"a {type(result).__name__}"


def _check_replaceable(parameters: Sequence[inspect.Parameter], settings: Settings) -> None:
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


def _check_others(call: Call, keys: list[Key]) -> None:
    if others := call.names_beside(keys, _HONOURED):
        raise InputError(
            f"arguments {others} have no meaning for the attention that replaces this module's "
            f"forward; leave them out, or use ulysses_degree=None with Contiguous and no mask, "
            f"which run the forward itself"
        )


def _check_options(call: Call) -> None:
    if call.option("attn_mask") is not None:
        raise InputError(
            "attn_mask is a dense mask, which no rank holds whole; use is_causal or a MaskSpec"
        )
    if call.option("dropout_p"):
        raise InputError(
            f"dropout_p={call.option('dropout_p')} is not supported under context parallelism; "
            f"use dropout_p=0.0"
        )
