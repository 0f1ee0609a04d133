"""A file as of `swin-dense export CONFIG CHECKPOINT --out FILE`, small enough to be written in each test."""

import json

import onnx
from onnx import TensorProto, helper


def write_file(path):
    """Write the file of a segmentor whose classes are the largest of the three colours of a pixel."""
    image = helper.make_tensor_value_info('img', TensorProto.FLOAT, ['B', 3, 'H', 'W'])
    size = helper.make_tensor_value_info('size', TensorProto.INT64, [2])
    labels = helper.make_tensor_value_info('labels', TensorProto.INT32, ['B', 'H', 'W'])
    nodes = [
        helper.make_node('ArgMax', ['img'], ['largest'], axis=1, keepdims=0),
        helper.make_node('Cast', ['largest'], ['labels'], to=TensorProto.INT32),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, 'colours', [image, size], [labels]), opset_imports=[helper.make_opsetid('', 17)]
    )
    model.ir_version = 8
    facts = {'format': 1, 'task': 'segmentation', 'classes': ['blue', 'green', 'red'], 'resize': None}
    helper.set_model_props(
        model, {'swin_dense': json.dumps({**facts, 'palette': [[0, 0, 255], [0, 255, 0], [255, 0, 0]]})}
    )
    onnx.save(model, path)
    return [str(path)]
