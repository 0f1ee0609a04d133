"""The workbench: whole models of mmdet and mmsegmentation, with any backbone.

Nothing here knows what a Swin is, and nothing else imports it but the commands and the public names.

| module | what it does |
| --- | --- |
| configs/ | adapts a recipe to own data, checks configs and data before a run, and writes a config as one file |
| building.py | builds the model of a config without memory, and runs what depends only on the size of an image |
| recipes/ | the published recipes: their files, figures and weights |
| weights.py | loads a whole model from its checkpoint, completely or with an error |
| training.py | prepares configs for training and testing, and chooses the checkpoint to resume from |
| predict.py | predictions of mmdet and mmseg models |
| export/ | whole detectors and segmentors in one ONNX file |
| runtime/ | those files, run with numpy and ONNX Runtime or OpenVINO, without torch; public as ``swin_dense.runtime`` |
"""
