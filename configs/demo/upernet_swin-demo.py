# UPerNet with a small Swin on the data of tools/make_demo_data.py, for a CPU.
_base_ = [
    './_base_.py',
    'mmseg::_base_/models/upernet_swin.py',
    'mmseg::_base_/datasets/ade20k.py',
    'mmseg::_base_/schedules/schedule_20k.py',
    'mmseg::_base_/default_runtime.py',
]
data_root = 'work_dirs/demo/data/ADEChallengeData2016'
# Classes of ADE20K used for the background and the shapes; mmseg ignores all others.
metainfo = dict(
    classes=('wall', 'ball', 'clock', 'box', 'flag', 'light'),
    palette=[(90, 90, 90), (220, 20, 60), (250, 170, 30), (60, 179, 113), (30, 144, 255), (199, 21, 133)],
)
crop_size = (128, 128)
max_iters = 1100

head = dict(num_classes=6, norm_cfg=dict(type='BN', requires_grad=True))
model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=_base_.swin,
    decode_head=dict(in_channels=_base_.channels, channels=64, **head),
    auxiliary_head=dict(in_channels=_base_.channels[2], channels=64, **head),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.9),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader

optim_wrapper = _base_.adamw
optim_wrapper.optimizer.lr = 1e-3
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='CosineAnnealingLR', begin=30, end=max_iters, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=max_iters))
