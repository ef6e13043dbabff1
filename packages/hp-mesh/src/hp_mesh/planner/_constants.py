"""General constants of the model: one set for every device, model and configuration."""

from collections.abc import Mapping
from types import MappingProxyType

# Bytes of one parameter and of what belongs to it: float32 master weight and gradient, two float32
# moments of AdamW, and a bf16 copy while it is used.
MASTER_BYTES = 4
GRADIENT_BYTES = 4
MOMENT_BYTES = 8
HALF_BYTES = 2
# bf16 logits, their float32 copy, the softmax and the float32 gradient, with one copy on the way.
LOGIT_BYTES = 16
# A loss over a vocabulary that tensor-parallel ranks share is made of separate kernels, and holds
# one more float32 value for each logit.
SHARED_LOSS_BYTES = 4
# Masks of two dropouts, per element of the hidden state, where kernels are not fused.
MASK_BYTES = 2
# Score matrices with softmax, dropout mask and dropout output (arXiv 2205.05198, equation 1).
SCORE_BYTES = 5
# A caching allocator keeps blocks that it cannot use; typical of training with changing sizes.
FRAGMENTATION = 1.02

# Share of the dense peak that large bf16 matrix products reach under a power limit.
GEMM_EFFICIENCY = 0.67
# fp8 products scale worse: the same power limit, and scales to apply.
FP8_EFFICIENCY = 0.55
# A side of a matrix product as long as this reaches half of the efficiency: tiles and waves.
GEMM_HALF_SIDE = 128
# Share of the dense peak that fused attention reaches, forward and backward together.
ATTENTION_EFFICIENCY = 0.32
# Share of that which is left where parts of a sequence go round: unequal causal parts, waiting.
RING_EFFICIENCY = 0.90
# A chunk of a sequence as long as this reaches half of it.
ATTENTION_HALF_CHUNK = 128
# Share of the data sheet's memory bandwidth that elementwise kernels reach.
HBM_EFFICIENCY = 0.80
# Share of the wire that collectives reach: protocol, and the slowest of many connections.
LINK_EFFICIENCY = 0.80
# Communication beside computation takes its share of cores and memory: this part of what is hidden.
OVERLAP_COST = 0.20
# Part of the tensor-parallel collectives that runs beside matrix products: those of the backward
# beside the weights' gradients, others in pieces.
TP_HIDDEN = 0.50
# Bytes of one weight that casting it to fp8, in both orders, moves.
CAST_BYTES = 4
# Bytes of one parameter that copying it out of a gathered buffer, or its gradient into the one to
# be reduced, moves on top of the collective.
GATHER_COPY_BYTES = 4
REDUCE_COPY_BYTES = 6
# AdamW reads weight, gradient and both moments, writes all but the gradient, all in float32; the
# gradient's norm reads it once more.
OPTIMIZER_BYTES = 32
# Bytes per logit that the loss reads and writes, forward and backward.
LOSS_BYTES = 24
# Passes over the score matrix, in bf16, by attention that is not fused.
SCORE_PASSES = 6
# Bytes per element of attention's output that merging one more part of a sequence moves: float32
# sum read and written, new part read.
MERGE_BYTES = 12
# The backward of attention has five matrix products where the forward has two.
ATTENTION_BACKWARD = 2.5
# Reading and writing in the backward of elementwise layers, against the forward.
ELEMENTWISE_BACKWARD = 1.5

# All of them by name, for reports.
CONSTANTS: Mapping[str, float] = MappingProxyType(
    {name: value for name, value in globals().items() if name.isupper()}
)
