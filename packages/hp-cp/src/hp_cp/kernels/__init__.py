"""Kernels that compute one block and its log-sum-exp."""
