# RetinaNet reads strides 8 to 32 only, so the first stage is no output: its norm would get no gradient.
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

model = dict(backbone=dict(_delete_=True, type='SwinDense', out_indices=(1, 2, 3)), neck=dict(start_level=0))
