_base_ = [
    '../_base_/models/cascade-mask-rcnn_swin_fpn.py',
    '../_base_/backbones/swin_tiny.py',
    '../_base_/datasets/coco_instance_ms-crop.py',
    '../_base_/schedules/coco_1x_official.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.0, **_base_.swin), neck=dict(in_channels=_base_.channels))
