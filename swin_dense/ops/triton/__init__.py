"""Triton kernels for CUDA: window attention, LayerNorm, and the relative position bias."""
