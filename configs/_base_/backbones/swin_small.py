# Swin-S, ImageNet-1K.
_base_ = './swin_tiny.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_small_patch4_window7_224.pth'
swin = dict(depths=[2, 2, 18, 2], init_cfg=dict(checkpoint=pretrained))
