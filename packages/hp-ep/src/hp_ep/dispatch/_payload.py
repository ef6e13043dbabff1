"""A narrower dtype for rows while they travel."""

import torch
from torch import Tensor

from .._errors import ExpertConfigError

_LEGAL = (torch.bfloat16, torch.float16, torch.float32)


def check_payload(payload: torch.dtype | None) -> torch.dtype | None:
    """Return ``payload``; `ExpertConfigError` for a dtype that is not meant for it."""
    if payload is not None and payload not in _LEGAL:
        raise ExpertConfigError(f"payload={payload} is not one of {list(_LEGAL)} or None")
    return payload


def narrow(rows: Tensor, payload: torch.dtype | None) -> Tensor:
    """Return ``rows`` in the payload's dtype where that is narrower than theirs.

    The gradient travels in the payload's dtype too.
    """
    if payload is None or payload.itemsize >= rows.element_size():
        return rows
    return rows.to(payload)
