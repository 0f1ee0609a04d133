"""Triton kernels for NVIDIA GPUs: window attention and LayerNorm, their launches, and the trials that admit them."""
