"""What a router may be given."""

import torch
from torch import Tensor

from .._errors import ExpertConfigError
from .._sizes import is_count


def check_tokens(x: Tensor, dim: int) -> None:
    """Raise an `ExpertConfigError` unless ``x`` is a floating ``[tokens, dim]``."""
    if x.dim() != 2 or x.shape[1] != dim or not x.is_floating_point():
        raise ExpertConfigError(
            f"the router got {x.dtype} of shape {tuple(x.shape)}; give a floating dtype of shape "
            f"[tokens, {dim}]"
        )


def check_sequences(ids: Tensor, num_tokens: int, num_sequences: int) -> None:
    """Raise an `ExpertConfigError` unless ``ids [num_tokens]`` name one of the sequences each."""
    if ids.shape != (num_tokens,) or ids.dtype != torch.int64:
        raise ExpertConfigError(
            f"sequence_ids are {ids.dtype} of shape {tuple(ids.shape)}; give torch.int64 of shape "
            f"({num_tokens},), one for each token"
        )
    if not is_count(num_sequences, 0):
        raise ExpertConfigError(f"num_sequences={num_sequences!r} must be an integer of at least 0")
    if not ids.is_cpu or not num_tokens:  # looking would synchronise
        return
    least, most = (edge.item() for edge in ids.aminmax())
    if least < 0 or most >= num_sequences:
        raise ExpertConfigError(
            f"sequence_ids from {least} to {most} of num_sequences={num_sequences}; use 0 .. "
            f"{num_sequences - 1}"
        )
