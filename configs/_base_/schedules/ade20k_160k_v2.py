# mmseg's recipe of V1 on ADE20K for Swin V2, whose position networks and scales are not decayed either.
_base_ = './ade20k_160k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(cpb_mlp=dict(decay_mult=0.0), logit_scale=dict(decay_mult=0.0)))
)
