"""Triton kernels for NVIDIA GPUs: window attention and LayerNorm."""
