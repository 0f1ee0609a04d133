"""The networks: backbones of both versions and the classifier."""
