"""The published architectures as data, their shapes and their weights."""
