"""The command line ``hp-mesh``, with commands plan, estimate, check, show, explain and groups.

The command line does not import torch.
"""

from ._main import main as main

__all__ = ["main"]
