"""Weights in safetensors files: each rank reads and writes only the elements that it stores.

A file starts with a header that gives each tensor's dtype, shape and position. Everything else is
the tensors' elements, in row-major order. Therefore every rank can read the boxes of global indices
that it stores, and write them to their place, without gathering a parameter anywhere.
"""

from ._load import load_safetensors as load_safetensors
from ._meta import parameters_on_meta as parameters_on_meta
from ._save import save_safetensors as save_safetensors
