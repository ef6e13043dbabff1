"""Tensors that one mesh axis splits into contiguous runs of unequal lengths."""

from . import _full_states as _full_states  # adds ragged tensors to torch's full state dicts
