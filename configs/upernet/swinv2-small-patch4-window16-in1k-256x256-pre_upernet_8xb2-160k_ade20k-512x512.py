_base_ = [
    '../_base_/models/upernet_swin.py',
    '../_base_/backbones/swinv2_small.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_160k_v2.py',
    'mmseg::_base_/default_runtime.py',
]

model = dict(
    data_preprocessor=dict(size=_base_.crop_size),
    backbone=_base_.swin,
    decode_head=dict(in_channels=_base_.channels),
    auxiliary_head=dict(in_channels=_base_.channels[2]),
)
