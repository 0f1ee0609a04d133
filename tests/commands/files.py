"""Files as of `swin-dense export CONFIG CHECKPOINT --out FILE`, small enough to be written in each test."""

import json

import onnx
from onnx import helper, numpy_helper

COLOURS = {
    'classes': ['blue', 'green', 'red'],
    'palette': [
        [0, 0, 255],
        [0, 255, 0],
        [255, 0, 0],
    ],
}
SEGMENTOR = {'format': 1, 'task': 'segmentation', 'resize': None, **COLOURS}


def write_model(path, graph, facts, weights=(), versions='ir_version: 8, opset_import: ["": 17]'):
    """Write a graph, in the textual form of ONNX, with weights by their names and the metadata of a whole model."""
    model = onnx.parser.parse_model(f'<{versions}> {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in dict(weights).items())
    helper.set_model_props(model, {'swin_dense': json.dumps(facts)})
    onnx.save(model, path)
    return path


def write_file(path, operator='ArgMax'):
    """Write the file of a segmentor whose classes are the largest, or smallest, of the three colours of a pixel."""
    graph = f"""colours (float[B, 3, H, W] img, int64[2] size) => (int32[B, H, W] labels) {{
        chosen = {operator} <axis = 1, keepdims = 0> (img)
        labels = Cast <to = 6> (chosen)
    }}"""
    return [str(write_model(path, graph, SEGMENTOR))]
