"""Parallel degrees, rank layout and device meshes for PyTorch."""

__version__ = "0.1.0"
