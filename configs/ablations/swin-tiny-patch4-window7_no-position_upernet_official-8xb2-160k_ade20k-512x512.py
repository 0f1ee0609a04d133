_base_ = '../upernet/swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512.py'

model = dict(backbone=dict(use_rel_pos_bias=False, init_cfg=None))
