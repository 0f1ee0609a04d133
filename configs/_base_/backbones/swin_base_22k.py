# Swin-B, ImageNet-22K.
_base_ = './swin_base.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window7_224_22k.pth'
swin = dict(init_cfg=dict(checkpoint=pretrained))
