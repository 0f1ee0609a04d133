_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

model = dict(backbone=dict(_delete_=True, type='SwinDense'))
