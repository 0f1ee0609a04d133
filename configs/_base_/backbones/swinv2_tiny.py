# Swin V2-T, trained on ImageNet-1K at 256x256 with window 8 and used here with window 16; `pretrained_window_size`
# sets the scale of the position network to the window of its training. See swin_tiny.py for `_base_.swin` and
# `_base_.channels`.
_base_ = './swin_tiny.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v2.0.0/swinv2_tiny_patch4_window8_256.pth'
swin = dict(type='SwinDenseV2', window_size=16, pretrained_window_size=8, init_cfg=dict(checkpoint=pretrained))
