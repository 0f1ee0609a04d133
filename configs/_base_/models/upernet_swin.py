# UPerNet for the 150 classes of ADE20K; all published recipes use this drop path rate.
_base_ = 'mmseg::_base_/models/upernet_swin.py'

model = dict(
    backbone=dict(_delete_=True, type='SwinDense', drop_path_rate=0.3),
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
