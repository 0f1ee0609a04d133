# Layer-wise learning rate decay, gradients accumulated over two steps, and a moving average of the weights (EMA).
_base_ = './swinv2-tiny-patch4-window16-in1k-256x256-pre_upernet_8xb2-160k_ade20k-512x512.py'

optim_wrapper = dict(
    constructor='SwinLayerDecayConstructor',
    paramwise_cfg=dict(_delete_=True, decay_rate=0.95, decay_type='layer_wise'),
    accumulative_counts=2,
)
custom_hooks = [dict(type='EMAHook', momentum=0.0002)]
