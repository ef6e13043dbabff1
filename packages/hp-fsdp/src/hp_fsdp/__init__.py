"""Fully sharded data parallel training without copies."""

__version__ = "0.1.0"
