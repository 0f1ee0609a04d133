"""Analysis of models: parameters and FLOPs."""
