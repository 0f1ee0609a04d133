"""Triton kernels for CUDA: window attention, LayerNorm and relative position bias."""
