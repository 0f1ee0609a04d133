_base_ = [
    '../_base_/models/faster-rcnn_swin_fpn.py',
    '../_base_/backbones/swin_tiny.py',
    '../_base_/datasets/coco_detection.py',
    '../_base_/schedules/coco_1x.py',
    'mmdet::_base_/default_runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.2, **_base_.swin), neck=dict(in_channels=_base_.channels))
