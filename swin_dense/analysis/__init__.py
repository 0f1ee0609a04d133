"""Analysis of backbones: accuracy, parameters, FLOPs, receptive fields, attention maps, Grad-CAM and figures."""
