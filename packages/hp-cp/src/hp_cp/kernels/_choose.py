"""From a name, or an object that a caller brings, to a backend that can do the work."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Parameter, signature
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor import AxisMesh

from .._errors import BackendError, described
from .._masks import MaskSpec
from .._plan import AttentionPlan
from .._ranges import Kernel
from ._eager import EAGER
from ._flex import FlexBackend
from ._interface import PLAIN, AttentionBackend, ScoreOptions
from ._sdpa import CUDNN, EFFICIENT, SDPA, hardware_of
from ._varlen import VARLEN

FLEX = FlexBackend()
_AUTOMATIC: tuple[AttentionBackend, ...] = (SDPA, EFFICIENT, FLEX, EAGER)
# FlexAttention, which is not compiled here, holds all scores of a block.
_AUTOMATIC_WITH_OPTIONS: tuple[AttentionBackend, ...] = (SDPA, EFFICIENT, EAGER, FLEX)
_BY_NAME: dict[str, AttentionBackend] = {b.name: b for b in (*_AUTOMATIC, CUDNN, VARLEN)}

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_USUAL_HEAD = 64
_LONG = 128  # rows that fill a kernel's tile
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def register_backend(backend: AttentionBackend) -> None:
    """Register a backend, so that ``backend=`` accepts its name.

    The registration applies to this process. A backend object can also be passed as ``backend=``
    without registration.

    Args:
        backend: The backend to register.

    Raises:
        BackendError: ``backend`` is not an `AttentionBackend`, its name is taken by another
            backend, or its name is ``"auto"``.

    Examples:
        >>> register_backend(my_backend)  # an AttentionBackend with the name "mine"
        >>> style = ContextParallel(seq_dim=2, head_dim=1, backend="mine")
    """
    _check(backend)
    if backend.name == "auto" or _BY_NAME.get(backend.name, backend) is not backend:
        raise BackendError(
            f"the name {backend.name!r} is taken; give the backend another than "
            f"{['auto', *_BY_NAME]}"
        )
    _BY_NAME[backend.name] = backend


def check_backend_name(backend: object) -> None:
    """Raise `BackendError` for a name that no backend has, and what is none or has no hash."""
    if not isinstance(backend, str):
        _check(backend)
        try:
            hash(backend)
        except TypeError:
            raise BackendError(
                f"backend {described(backend)} has no hash, by which plans for it are kept; make "
                f"its class @dataclass(frozen=True) or (eq=False), or register_backend it"
            ) from None
    elif backend != "auto" and backend not in _BY_NAME:
        raise BackendError(
            f"no backend {backend!r}; use one of {['auto', *_BY_NAME]} or an AttentionBackend "
            f"object"
        )


def check_device(backend: str | AttentionBackend, mesh: AxisMesh) -> None:
    """Raise `BackendError` for a backend that computes nothing on the devices of a `DeviceMesh`."""
    if backend == "auto" or not isinstance(mesh, DeviceMesh):
        return
    chosen = _BY_NAME[backend] if isinstance(backend, str) else backend
    device = torch.device(mesh.device_type)
    reasons = [
        chosen.supports("full", device, dtype, _USUAL_HEAD, _USUAL_HEAD, PLAIN) for dtype in _DTYPES
    ]
    if all(reasons):
        raise BackendError(
            f"backend {chosen.name!r} computes nothing on {device.type}, the device of the mesh: "
            f"{reasons[0]}; use 'auto'"
        )


@dataclass(frozen=True, slots=True)
class Backends:
    """What computes the blocks of a plan.

    ``masked`` those of which a mask function tells the pairs, if the mask has one, ``blocks`` the
    others; ``windows`` says that it takes whole windows.
    """

    blocks: AttentionBackend
    masked: AttentionBackend | None = None
    windows: bool = False


def choose_backends(
    backend: str | AttentionBackend,
    plan: AttentionPlan,
    device: torch.device,
    dtype: torch.dtype,
    options: ScoreOptions,
) -> Backends:
    """Return the backend of that name, or the one given, and what computes masked blocks.

    That is the same one if it takes mask functions, else the first of ``auto`` that does. Raises
    `BackendError` where one lacks what it is to compute; nothing is communicated.
    """
    sizes = plan.head_size, plan.value_size
    given = device, dtype, *sizes
    chosen = choose_backend(backend, _kinds_of(plan), *given, options, regular=_is_regular(plan))
    masked = None
    if plan.mask.mask_mod is not None:
        with_function = replace(options, mask_mod=plan.mask.mask_mod)
        takes = chosen.supports("full", *given, with_function) is None
        name: str | AttentionBackend = chosen if takes else "auto"
        masked = choose_backend(name, ("full",), *given, with_function, regular=False)
    windows = plan.mask.window is not None and (
        chosen.supports("full", *given, replace(options, window=(1, 1))) is None
    )
    return Backends(chosen, masked, windows)


def _kinds_of(plan: AttentionPlan) -> tuple[Kernel, ...]:
    """Return the kinds of blocks that some rank may have, beside those of a mask function.

    Such a function cuts causal squares into smaller ones and rectangles.
    """
    mask = plan.mask
    if mask.band == (None, None):
        return ("full",)
    squares = plan.n == plan.ulysses_degree and mask.window is None and mask.mask_mod is None
    return ("causal",) if squares else ("causal", "full")


def _is_regular(plan: AttentionPlan) -> bool:
    """Return whether blocks are long and have the same shapes in every batch of this length.

    Documents are others in every batch, and the edges of windows and functions make many small
    blocks.
    """
    return plan.mask == MaskSpec(causal=plan.mask.causal) and _shortest(plan) >= _LONG


@lru_cache(maxsize=16)
def _shortest(plan: AttentionPlan) -> int:
    """Return the least number of positions that a rank of the schedule holds in one stretch."""
    shortest = min((len(chunk) for held in plan.groups for chunk in held), default=0)
    return shortest // 2 if plan.load_balance else shortest


def choose_backend(
    backend: str | AttentionBackend,
    kernels: Sequence[Kernel],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    value_size: int | None = None,
    options: ScoreOptions = PLAIN,
    *,
    regular: bool = True,
) -> AttentionBackend:
    """Return the backend of that name, or the one given, if it can compute blocks of all kinds.

    ``auto`` is ``sdpa`` where that can, else ``efficient``, else ``flex``, else ``eager``, which
    goes before ``flex`` for scores that are more than scaled. Before them it is
    ``cudnn`` on devices where that is the fastest, if blocks are ``regular``, long and of the same
    shapes in every batch, and results need not be the same bits every time. Others are taken by
    name only. The answer depends on the kind of device; nothing is communicated.
    """
    check_backend_name(backend)
    asked = _Asked(
        kernels, device, dtype, head_size, head_size if value_size is None else value_size, options
    )
    if not isinstance(backend, str):
        chosen = backend
    elif backend == "auto":
        order = _fastest(device, options) if regular else _automatic(options)
        chosen = asked.first(order) or _BY_NAME["sdpa"]
    else:
        chosen = _BY_NAME[backend]
    if lack := asked.lack(chosen):
        other = asked.first(_automatic(options))
        remedy = f"use {other.name!r}" if other else "pass backend= an AttentionBackend that can"
        raise BackendError(
            f"backend {chosen.name!r} cannot compute {lack[0]} attention of {dtype} on "
            f"{device.type}: {lack[1]}; {remedy}"
        )
    return chosen


class _Asked(NamedTuple):
    """What a backend is to compute."""

    kernels: Sequence[Kernel]
    device: torch.device
    dtype: torch.dtype
    head_size: int
    value_size: int
    options: ScoreOptions

    def first(self, backends: Sequence[AttentionBackend]) -> AttentionBackend | None:
        """Return the first of some backends that can compute all."""
        return next((b for b in backends if self.lack(b) is None), None)

    def lack(self, backend: AttentionBackend) -> tuple[Kernel, str] | None:
        """Return the first kind of block that the backend cannot compute, and why."""
        for kernel in self.kernels:
            if reason := backend.supports(kernel, *self[1:]):
                return kernel, reason
        return None


def _automatic(options: ScoreOptions) -> Sequence[AttentionBackend]:
    """Return the backends for these options, the first choice first."""
    return _AUTOMATIC if options.lack("scale") is None else _AUTOMATIC_WITH_OPTIONS


def _fastest(device: torch.device, options: ScoreOptions) -> Sequence[AttentionBackend]:
    """Return the backends for regular blocks, the fastest first."""
    # Its backward adds in any order.
    if torch.are_deterministic_algorithms_enabled() or not hardware_of(device).prefers_cudnn:
        return _automatic(options)
    return (CUDNN, *_automatic(options))


def _check(backend: object) -> None:
    if isinstance(backend, type) or not isinstance(backend, AttentionBackend):
        raise BackendError(
            f"a backend is a name or an AttentionBackend object, got {described(backend)}; use "
            f"'auto'"
        )
    for part in (backend.supports, backend.forward, backend.backward):
        taken = signature(part).parameters
        if "options" not in taken and not any(p.kind in _REST for p in taken.values()):
            raise BackendError(
                f"backend {backend.name!r} takes no options in {part.__name__}, so that it would "
                f"not know of a softcap; give it the parameters that AttentionBackend has, with "
                f"options, a ScoreOptions, in place of scale"
            )
