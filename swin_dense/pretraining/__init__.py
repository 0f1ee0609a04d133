"""Pretraining without labels: SimMIM and feature distillation, their teachers and their data set.

A name is imported when it is asked for, as in :mod:`swin_dense.features`.
"""

from typing import TYPE_CHECKING, Any

from swin_dense.utils.lazy import public_name

if TYPE_CHECKING:
    from swin_dense.pretraining.distillation import FeatureDistillation
    from swin_dense.pretraining.simmim import SimMIM
    from swin_dense.pretraining.teacher_maps import StoredMaps, store_maps
    from swin_dense.pretraining.teachers import Teacher, teacher_of
    from swin_dense.pretraining.unlabelled import UnlabelledImages

__all__ = ['FeatureDistillation', 'SimMIM', 'StoredMaps', 'Teacher', 'UnlabelledImages', 'store_maps', 'teacher_of']
_HOMES = {
    'FeatureDistillation': 'distillation',
    'SimMIM': 'simmim',
    'StoredMaps': 'teacher_maps',
    'Teacher': 'teachers',
    'UnlabelledImages': 'unlabelled',
    'store_maps': 'teacher_maps',
    'teacher_of': 'teachers',
}


def __getattr__(name: str) -> Any:
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return __all__
