"""The command line: plan, estimate, check, show, explain and groups, without torch."""

from ._main import main as main

__all__ = ["main"]
