"""What can be chosen by name, for functions and for the help of commands, which imports neither torch nor numpy."""

# Libraries in whose format weights are written.
FAMILIES = ('mmdet', 'mmseg', 'official', 'mmpretrain', 'timm', 'torchvision', 'transformers')
# Power of the generalised mean over the cells of a level; gem's, of the positive part, lies between the average and the
# maximum.
POOLINGS = {'avg': 1.0, 'gem': 3.0}
LANGUAGES = ('en', 'zh')  # of the page of `swin-dense explore`
LARGEST_PAGE = 12_000_000  # bytes
EXPORT_SUFFIXES = ('.onnx', '.pt2', '.ts')
RUNTIMES = ('onnxruntime', 'openvino')  # libraries that execute whole models
# Suffixes of whole models that were exported, and the library that executes them by default.
EXPORTED = {'.onnx': 'onnxruntime', '.xml': 'openvino'}
PRECISIONS = ('float32', 'bfloat16')  # in which they compute
