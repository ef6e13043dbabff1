"""`RaggedTensor`: a distributed tensor that one mesh axis splits into runs of unequal lengths."""

from . import _full_states as _full_states  # adds ragged tensors to torch's full state dicts
