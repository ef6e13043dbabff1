"""The command line ``hp-mesh``, with commands plan, estimate, check, show, explain and groups.

Does not need torch.
"""

from ._main import main as main

__all__ = ["main"]
