# The authors' recipe for Swin V1 on COCO, for V2: no weight decay for position networks and logit scales either.
_base_ = './coco_3x_official.py'

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(cpb_mlp=dict(decay_mult=0.0), logit_scale=dict(decay_mult=0.0)))
)
