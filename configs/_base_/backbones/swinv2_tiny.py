# Swin V2-T, ImageNet-1K at 256x256 with window 8, here with window 16: the position network knows the windows that it
# was trained with. A config that lists this file takes `_base_.swin` and `_base_.channels`, see swin_tiny.py.
_base_ = './swin_tiny.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v2.0.0/swinv2_tiny_patch4_window8_256.pth'
swin = dict(type='SwinDenseV2', window_size=16, pretrained_window_size=8, init_cfg=dict(checkpoint=pretrained))
