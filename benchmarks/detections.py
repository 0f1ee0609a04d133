r"""Draw docs/images/nuclei.jpg: what a model that benchmarks/real_data.py trained and exported finds on photographs.

python benchmarks/real_data.py nuclei CLONE --size medium --seed 0 --backbone SwinDense
python benchmarks/detections.py work_dirs/real_data/nuclei-medium-0-SwinDense/model.onnx \
    work_dirs/real_data/nuclei-medium-data

Two photographs are of the validation images, which are in the public domain (CC0). The third is the
immunohistochemistry of scikit-image, from another laboratory and with another stain.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image
from pycocotools import mask as coco_masks
from skimage import data

from swin_dense import runtime

PICTURE = Path(__file__).resolve().parent.parent / 'docs' / 'images' / 'nuclei.jpg'
# The beginnings of their names: both were chosen before the model had predicted them.
VALIDATION = {'175dbb36': 'validation, fluorescence', '5ef4442e': 'validation, stained tissue'}
CORNER, SIDE = (160, 240), 256  # left, top and size of the part of the third photograph: as large as in training
COLOURS = plt.get_cmap('tab10').colors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', type=Path, help='exported file')
    parser.add_argument('folder', type=Path, help='folder of the converted images')
    parser.add_argument('--score', type=float, default=0.3, help='minimum score (default: %(default)s)')
    parser.add_argument('--out', type=Path, default=PICTURE)
    args = parser.parse_args()
    predict = runtime.load(args.model, score=args.score)
    photographs = read(args.folder)
    figure, axes = plt.subplots(2, len(photographs), figsize=(10, 7), constrained_layout=True)
    for (title, photograph), (plain, drawn) in zip(photographs.items(), axes.T, strict=True):
        found = predict(photograph)['instances']
        for axis in (plain, drawn):
            axis.imshow(photograph)
            axis.axis('off')
        draw(drawn, found)
        plain.set_title(title, fontsize=11)
        drawn.set_title(f'{len(found)} nuclei, score {args.score} or more', fontsize=11)
    figure.savefig(args.out, dpi=90, pil_kwargs={'quality': 88})


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return the photographs, (H, W, 3) uint8, by title."""
    coco = json.loads((folder / 'val.json').read_text())
    counts = Counter(one['image_id'] for one in coco['annotations'])
    found = {}
    for one in coco['images']:
        name = one['file_name']
        if name[:8] in VALIDATION:
            title = f'{VALIDATION[name[:8]]}: {counts[one["id"]]} nuclei'
            found[title] = np.asarray(Image.open(folder / 'val' / name).convert('RGB'))
    left, top = CORNER
    part = data.immunohistochemistry()[top : top + SIDE, left : left + SIDE]
    return found | {'another laboratory and stain': np.ascontiguousarray(part)}


def draw(axis: Any, found: Sequence[dict[str, Any]]) -> None:
    """Draw the box and the mask of each instance, in the pixels of the photograph."""
    for index, one in enumerate(found):
        colour = COLOURS[index % len(COLOURS)]
        left, top, right, bottom = one['box']
        # Boxes count from the corner of the first pixel, of which imshow puts the centre at 0.
        axis.add_patch(Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=colour, lw=0.7))
        mask = coco_masks.decode(one['mask'])
        axis.imshow(np.where(mask[..., None], (*colour, 0.45), 0.0))
        axis.contour(mask, levels=[0.5], colors=[colour], linewidths=0.8)


if __name__ == '__main__':
    main()
