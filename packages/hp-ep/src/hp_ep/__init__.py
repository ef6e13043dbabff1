"""Expert parallel mixture-of-experts layers for PyTorch."""

__version__ = "0.1.0"
