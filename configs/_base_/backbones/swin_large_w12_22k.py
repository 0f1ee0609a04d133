# Swin-L with window 12, ImageNet-22K at 384x384.
_base_ = './swin_large_22k.py'

pretrained = (
    'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_large_patch4_window12_384_22k.pth'
)
swin = dict(window_size=12, pretrain_img_size=384, init_cfg=dict(checkpoint=pretrained))
