"""Convert a backbone's file for ExecuTorch (XNNPACK), LiteRT and Core ML, and compare what runs with the backbone.

    .venv-nox/bin/nox --session converters    # tests the conversions and writes benchmarks/results/converters.json
    python benchmarks/converters.py --out benchmarks/results/converters.json

The files are those of ``export_model(..., dynamic=False)``: Swin-T with random weights, for one image. Errors are
relative to the largest value of each output. Core ML's tools convert on Linux, but its models run on macOS alone.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness import largest_error
from measurements import Run
from torch import Tensor

from swin_dense import SwinBackbone, export_model

SIZE = (224, 224)
PACKAGES = {'executorch': ('executorch',), 'litert': ('litert-torch', 'ai-edge-litert'), 'coreml': ('coremltools',)}
# Maps an image to the outputs of a converted file, in the order of the backbone.
Predict = Callable[[Tensor], Sequence[Tensor]]


def to_executorch(file: Path, folder: Path, img: Tensor) -> tuple[Path, Predict]:
    """Convert a .pt2 file for ExecuTorch with XNNPACK, and return the new file and a function that runs it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    edge = to_edge_transform_and_lower(torch.export.load(file), partitioner=[XnnpackPartitioner()])
    path = folder / 'model.pte'
    path.write_bytes(edge.to_executorch().buffer)
    method = Runtime.get().load_program(path).load_method('forward')
    return path, lambda img: method.execute([img])


def to_litert(file: Path, folder: Path, img: Tensor) -> tuple[Path, Predict]:
    """Convert a .pt2 file for LiteRT, and return the new file and a function that runs it; ``img`` gives the shape."""
    import litert_torch
    from ai_edge_litert.interpreter import Interpreter

    path = folder / 'model.tflite'
    litert_torch.convert(torch.export.load(file).module(), (img,)).export(str(path))
    signature = Interpreter(str(path)).get_signature_runner()
    (name,) = signature.get_input_details()

    def run(img: Tensor) -> list[Tensor]:
        outputs = signature(**{name: img.numpy()})
        return [torch.from_numpy(outputs[name]) for name in sorted(outputs)]

    return path, run


def to_coreml(file: Path, folder: Path, img: Tensor) -> tuple[Path, None]:
    """Convert a .pt2 file for Core ML, and return the new package, which only runs on macOS."""
    import coremltools

    path = folder / 'model.mlpackage'
    coremltools.convert(torch.export.load(file).run_decompositions({})).save(str(path))
    return path, None


CONVERTERS: dict[str, Callable[[Path, Path, Tensor], tuple[Path, Predict | None]]] = {
    'executorch': to_executorch,
    'litert': to_litert,
    'coreml': to_coreml,
}


def size_of(path: Path) -> int:
    """Return the bytes of a file or of the files in a folder."""
    return sum(one.stat().st_size for one in [path, *path.rglob('*')] if one.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='JSON file to write')
    args = parser.parse_args()
    torch.manual_seed(0)
    backbone = SwinBackbone('t').eval()
    img = torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        expected = backbone(img)
    run = Run(args.out, packages=('torch', *itertools.chain(*PACKAGES.values())))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, convert in CONVERTERS.items():
            file = folder / f'{name}.pt2'
            export_model(backbone, file, dynamic=False, size=SIZE)
            path, predict = convert(file, folder, img)
            names = {'what': 'conversion', 'way': name, 'model': 'swin_t', 'size': ' x '.join(map(str, img.shape))}
            run.add(size_of(path), 'size of the file', 'bytes', **names)
            if predict is not None:
                error = max(map(largest_error, predict(img), expected))
                run.add(error, 'difference from the backbone', 'of the largest value', **names)
            print(name, size_of(path), flush=True)


if __name__ == '__main__':
    main()
