"""What a context parallel module runs in place of its forward."""

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from hp_dtensor import AxisMesh

from ._call import Call
from ._dtensors import take_local_rows
from ._errors import BackendError, described
from ._inner import exchange_around
from ._inputs import (
    as_autocast,
    check_scale,
    check_tensors,
    from_batch_first,
    plan_inputs,
    to_batch_first,
)
from ._layouts import Contiguous
from ._masks import MaskSpec
from ._mesh import Seats, seats_of
from ._options import (
    as_sdpa,
    check_bare,
    check_causal,
    check_options,
    check_others,
    check_replaceable,
)
from ._plan import AttentionPlan
from ._planned import planned_attention
from ._settings import Settings
from ._torch import keep_eager
from ._ulysses import exchange_of
from .kernels._choose import check_device, choose_backend


class ContextParallelForward:
    """A module's forward over the ranks of a mesh; keeps nothing between calls."""

    def __init__(
        self, module: nn.Module, mesh: AxisMesh, n: int, degree: int, settings: Settings
    ) -> None:
        """Stand for the forward of ``module`` on ``n`` ranks.

        Raises `InputError` where that will not run and what it computes cannot be told from its
        arguments, or needs parameters of the module, and `BackendError` for a backend that is not
        used or has no kernels for the devices of ``mesh``.
        """
        inner = module.forward
        functools.update_wrapper(self, inner)
        self._inner = inner
        self._parameters = tuple(inspect.signature(inner).parameters.values())
        self._mesh = mesh
        self._ulysses_degree = degree
        self._settings = settings
        in_order = degree == n and isinstance(settings.layout, Contiguous)
        self._runs_inner = in_order and settings.mask is None
        if not self._runs_inner:
            check_bare(module)
            self._parameters = as_sdpa(self._parameters, settings)
            check_replaceable(self._parameters, settings)
            check_device(settings.backend, mesh)
        elif settings.backend != "auto":
            raise BackendError(
                f"backend={described(settings.backend)} would not be used where the module's own "
                f"forward runs; leave it 'auto', or give the style a mask, a layout or a "
                f"ulysses_degree under which the forward is replaced"
            )

    @keep_eager  # a plan is no tensor program
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, with this rank's rows of the attention."""
        settings = self._settings
        call = Call.of(self._parameters, args, kwargs)
        names = settings.qkv_kwarg_names or (None, None, None)
        keys = [call.key(i, name) for i, name in zip(settings.qkv_indices, names, strict=True)]
        q, k, v = (call.values[key] for key in keys)
        check_tensors(q, k, v)
        (q, k, v), seq_len = take_local_rows((q, k, v), self._mesh, settings)
        check_options(call)
        seats = seats_of(self._mesh, self._ulysses_degree, settings.collectives)
        if not self._runs_inner:
            check_others(call, keys)
            check_causal(call, settings)
            check_scale(call.option("scale"))
            q, k, v = (as_autocast(x) for x in (q, k, v))
        mask = settings.mask or MaskSpec(causal=call.option("is_causal") is True)
        plan = self._planned(q, k, v, seats, mask, seq_len)
        dims = (settings.seq_dim, settings.head_dim)
        if self._runs_inner:

            def inner(*whole: Tensor) -> Any:
                args, kwargs = call.rebuild(dict(zip(keys, whole, strict=True)))
                return self._inner(*args, **kwargs)

            return exchange_around(inner, (q, k, v), plan, exchange_of(plan, seats), *dims)
        kernel = choose_backend(
            settings.backend,
            plan.kernels,
            q.device,
            q.dtype,
            plan.head_size,
            regular=plan.regular,
        )
        seats.across.connect(q.device)
        q, k, v = (to_batch_first(x, *dims) for x in (q, k, v))
        out = planned_attention(q, k, v, plan, seats, kernel, call.option("scale"))
        return from_batch_first(out, *dims)

    @property
    def runs_inner(self) -> bool:
        """Return whether the module's own forward computes the attention."""
        return self._runs_inner

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
