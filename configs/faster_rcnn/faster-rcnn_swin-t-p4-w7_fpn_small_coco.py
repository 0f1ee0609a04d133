# A detector for some tens of photographs, trained on a laptop's CPU: small images, the first three stages of Swin-T
# frozen as ImageNet left them, fewer regions per image, short warm-up. For accuracy on many images, take the 1x recipe.
_base_ = './faster-rcnn_swin-t-p4-w7_fpn_1x_coco.py'

scale = (448, 448)  # the longer side
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile', backend_args=None),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
model = dict(
    backbone=dict(frozen_stages=3, drop_path_rate=0.0),
    train_cfg=dict(rpn_proposal=dict(nms_pre=1000, max_per_img=500), rcnn=dict(sampler=dict(num=128))),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=300)),
)
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
default_hooks = dict(logger=dict(interval=5), checkpoint=dict(max_keep_ckpts=1))
