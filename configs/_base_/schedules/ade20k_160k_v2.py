# mmseg's recipe for Swin V1 on ADE20K, for V2: no weight decay for position networks and logit scales either.
_base_ = './ade20k_160k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(cpb_mlp=dict(decay_mult=0.0), logit_scale=dict(decay_mult=0.0)))
)
