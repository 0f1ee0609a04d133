"""The public names, imported eagerly, and the reasons why some of them cannot be imported."""

from importlib import import_module
from importlib.util import find_spec

why_no_core: str | None = None
why_no_mm: Exception | None = None
for _name in ('numpy', 'PIL.Image', 'torch'):
    try:
        import_module(_name)
    except Exception as error:  # a broken package can raise any error, and `swin-dense doctor` must still run
        _package = _name.partition('.')[0]
        why_no_core = f'swin_dense needs {_package}, which cannot be imported ({type(error).__name__}: {error})'
        break
else:
    from swin_dense.checkpoint import CheckpointError as CheckpointError
    from swin_dense.checkpoint import allow_partial_loading as allow_partial_loading
    from swin_dense.checkpoint import export_state_dict as export_state_dict
    from swin_dense.checkpoint import load_checkpoint as load_checkpoint
    from swin_dense.export import export_model as export_model
    from swin_dense.features.pyramid import extract_pyramid as extract_pyramid
    from swin_dense.models.classifier import SwinClassifier as SwinClassifier
    from swin_dense.models.create import create_backbone as create_backbone
    from swin_dense.models.simmim import SimMIM as SimMIM
    from swin_dense.models.swin import SwinBackbone as SwinBackbone
    from swin_dense.models.swin_v2 import SwinV2Backbone as SwinV2Backbone
    from swin_dense.workbench.export import export_detector as export_detector
    from swin_dense.workbench.export import export_segmentor as export_segmentor

    if find_spec('mmengine') is not None:
        try:  # the import registers both classes in mmengine's root registry
            from swin_dense.mm import SwinDense as SwinDense
            from swin_dense.mm import SwinDenseV2 as SwinDenseV2
        except Exception as error:  # a broken mmengine can raise any error, and the core does not need it
            why_no_mm = error
