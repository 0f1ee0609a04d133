"""The published architectures as data, and their weights."""
