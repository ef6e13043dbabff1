"""How much memory this process has used at most."""

import resource
import sys

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of torch's allocations on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
