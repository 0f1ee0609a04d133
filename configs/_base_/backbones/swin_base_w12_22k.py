# Swin-B with window 12, ImageNet-22K at 384x384.
_base_ = './swin_base_w12.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window12_384_22k.pth'
swin = dict(init_cfg=dict(checkpoint=pretrained))
