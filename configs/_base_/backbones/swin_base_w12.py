# Swin-B with window 12, ImageNet-1K at 384x384.
_base_ = './swin_base.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window12_384.pth'
swin = dict(window_size=12, pretrain_img_size=384, init_cfg=dict(checkpoint=pretrained))
