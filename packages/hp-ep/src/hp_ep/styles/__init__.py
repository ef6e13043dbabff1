"""Parallel styles: how a mixture-of-experts layer is spread over a mesh."""
