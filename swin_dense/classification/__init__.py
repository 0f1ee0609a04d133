"""Swin as an image classifier: the model, and what it scores on a folder of images."""
