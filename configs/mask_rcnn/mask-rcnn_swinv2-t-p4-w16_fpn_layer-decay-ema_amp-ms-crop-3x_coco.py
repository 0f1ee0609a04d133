# Layer-wise learning rate decay, gradients accumulated over two steps, and a moving average of the weights (EMA).
_base_ = './mask-rcnn_swinv2-t-p4-w16_fpn_amp-ms-crop-3x_coco.py'

optim_wrapper = dict(
    constructor='SwinLayerDecayConstructor',
    paramwise_cfg=dict(_delete_=True, decay_rate=0.95, decay_type='layer_wise'),
    accumulative_counts=2,
)
custom_hooks = [dict(type='EMAHook', momentum=0.0002)]
