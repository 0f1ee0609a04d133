_base_ = [
    '../_base_/models/mask-rcnn_swin_fpn.py',
    '../_base_/backbones/swinv2_base.py',
    '../_base_/datasets/coco_instance_ms-crop.py',
    '../_base_/schedules/coco_3x_v2.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.3, **_base_.swin), neck=dict(in_channels=_base_.channels))
