"""Swin V1 and V2 backbones, and the classifier."""
