"""From a name, or an object that a caller brings, to a backend that can do the work."""

from collections.abc import Sequence

import torch

from .._errors import BackendError
from .._plan import Kind
from ._interface import AttentionBackend
from ._sdpa import SdpaBackend


def choose_backend(
    backend: str | AttentionBackend,
    kinds: Sequence[Kind],
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionBackend:
    """Return the backend of that name, or the one given, if it can compute blocks of all kinds."""
    if isinstance(backend, str):
        if backend not in ("auto", "sdpa"):
            raise BackendError(
                f"no backend {backend!r}; use 'auto', 'sdpa' or an AttentionBackend object"
            )
        backend = SdpaBackend()
    for kind in kinds:
        if reason := backend.supports(kind, device, dtype):
            raise BackendError(
                f"backend {backend.name!r} cannot compute {kind} attention of {dtype} on "
                f"{device.type}: {reason}; pass backend= an AttentionBackend that can"
            )
    return backend
