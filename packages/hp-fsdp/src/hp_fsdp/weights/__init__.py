"""Load and save the weights of sharded models as safetensors files.

A safetensors file starts with a header that gives the dtype, shape and position of each tensor. The
elements of the tensors follow, in row-major order. So each rank can compute the positions of the
elements that it stores, and read or write only these. No parameter is gathered.
"""

from ._load import load_safetensors as load_safetensors
from ._meta import parameters_on_meta as parameters_on_meta
from ._save import save_safetensors as save_safetensors
