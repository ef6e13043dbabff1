"""Command line: plan, estimate, check, show, explain and groups. Needs no torch."""

from ._main import main as main

__all__ = ["main"]
