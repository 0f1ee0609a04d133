# The recipe of GFM, https://github.com/mmendiet/GFM: the backbone starts from random weights, and its teacher is the
# authors' Swin-B of ImageNet-22K.
_base_ = './simmim_swin-b-p4-w6_100e_192x192.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window7_224_22k.pth'
teacher = dict(
    type='SwinDense',
    embed_dims=128,
    depths=[2, 2, 18, 2],
    num_heads=[4, 8, 16, 32],
    window_size=7,
    clamp_window=True,
    out_indices=(3,),
    init_cfg=dict(type='Pretrained', checkpoint=pretrained),
)
model = dict(teacher=teacher, teacher_size=224, teacher_weight=1.0)
