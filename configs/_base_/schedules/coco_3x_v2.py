# The authors' recipe of V1 on COCO for Swin V2, whose position networks and scales are not decayed either.
_base_ = './coco_3x_official.py'

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys=dict(cpb_mlp=dict(decay_mult=0.0), logit_scale=dict(decay_mult=0.0)))
)
