"""Tensors whose ranks hold contiguous runs of unequal lengths."""
