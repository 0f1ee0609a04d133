# Swin V2-S, ImageNet-1K at 256x256 with window 8.
_base_ = './swinv2_tiny.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v2.0.0/swinv2_small_patch4_window8_256.pth'
swin = dict(depths=[2, 2, 18, 2], init_cfg=dict(checkpoint=pretrained))
