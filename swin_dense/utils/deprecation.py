"""Public names and commands of 0.3.0 that are gone, and what to use instead.

The table 'From 0.3 to 0.4' of the changelog says the same.
"""

from __future__ import annotations

from importlib.abc import MetaPathFinder
from typing import Any

_MMPRETRAIN = 'SimMIM of mmpretrain, whose checkpoints load here, pretrains'
_EXTRACTOR = 'swin_dense.features.Extractor in Ray Data, datasets or Spark spreads the work over machines'
_LARGE = 'examples/predict_large.py predicts tiles with rasterio and supervision'
_WORDS = 'words select recipes, as in `swin-dense zoo panoptic coco swin-l`'
_AT_LOADING = 'load_checkpoint has an argument of this name; then export_state_dict'
_IN_PYTHON = 'build the backbone with create_backbone(checkpoint=...), and write the result of export_state_dict'
_WHOLE = 'swin_dense.export_whole exports detectors and segmentors'
_COMPLEXITY = 'examples/complexity.py has the formulas and the plot'
_SUPERVISION = 'supervision reads and writes COCO, as docs/own-data.md shows'


def _options(command: str, instead: str, *names: str) -> dict[str, str]:
    return {f'swin-dense {command} --{name}': instead for name in names}


# By the full name of an object or a module, or by the command line.
GONE = {
    'swin_dense.SimMIM': _MMPRETRAIN,
    'swin_dense.features.unlabelled': _MMPRETRAIN,
    **dict.fromkeys(('swin_dense.mm.HeldOutLoss', 'swin_dense.mm.ImageNormalizer'), _MMPRETRAIN),
    **dict.fromkeys(('swin_dense.mm.PretrainingHook', 'swin_dense.mm.SimMIMPretrainer'), _MMPRETRAIN),
    **dict.fromkeys(('swin_dense.export_detector', 'swin_dense.export.export_detector'), _WHOLE),
    **dict.fromkeys(('swin_dense.export_segmentor', 'swin_dense.export.export_segmentor'), _WHOLE),
    'swin_dense.integrations.detectron2': 'examples/detectron2_swin.py has the backbone for detectron2',
    'swin_dense.integrations.smp': (
        "after import swin_dense.integrations.timm, segmentation_models_pytorch takes encoder_name='tu-swin_dense_t'"
    ),
    'swin_dense.integrations.torchvision': 'docs/elsewhere.md has the ten lines for torchvision',
    'swin_dense.integrations.transformers': (
        "after import swin_dense.integrations.timm, transformers takes TimmBackboneConfig(backbone='swin_dense_t')"
    ),
    'swin_dense.runtime.Coco': _SUPERVISION,
    'swin-dense eval': "timm's validate.py measures a classifier that swin_dense.integrations.timm registers",
    'swin-dense visualize': 'examples/pictures.py draws pyramids, attention, windows and masks; grad-cam, its own maps',
    'swin-dense convert --hash': 'sha256sum names the digest of a file',
    'swin-dense convert --json': 'load_checkpoint returns the report',
    'swin-dense convert --source-window-size': 'load_checkpoint(..., window_size=...), then export_state_dict',
    'swin-dense doctor --again': 'the Triton kernel is tried where it is used',
    'swin-dense doctor --json': 'its output is text alone',
    'swin-dense features --format': 'it writes safetensors and a table; numpy writes other formats',
    'swin-dense features --prune': 'it goes on where it stopped; delete the folder to begin anew',
    'swin-dense test --published': '`swin-dense zoo --weights` lists the addresses of published weights',
    'swin-dense zoo --markdown': '--weights is its name',
    **_options('convert', _AT_LOADING, 'ema', 'final-norm', 'trust'),
    **_options('convert', _IN_PYTHON, 'arch', 'channel-policy', 'in-channels', 'table-resize', 'window-size'),
    **_options('features', _EXTRACTOR, 'part-rows', 'shard'),
    **_options('flops', _COMPLEXITY, 'arch', 'channels', 'force', 'grid', 'out', 'window-size'),
    **_options('predict', _LARGE, 'overlap', 'tile'),
    **_options('predict', _SUPERVISION, 'annotations', 'format'),
    **_options('zoo', _WORDS, 'arch', 'data', 'task'),
}


def why_gone(name: str) -> str | None:
    """Return the error for a name or command of 0.3.0 that is gone, or None if it is not one of these."""
    return f'{name} was removed in 0.4.0: {GONE[name]}' if name in GONE else None


class GoneModules(MetaPathFinder):
    """Raises the error for the import of something that is gone; it is asked after nothing else was found."""

    def find_spec(self, name: str, *_: Any) -> None:
        if (reason := why_gone(name)) is not None:
            raise ImportError(reason, name=name)
