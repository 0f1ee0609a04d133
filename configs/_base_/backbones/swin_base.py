# Swin-B, ImageNet-1K.
_base_ = './swin_small.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window7_224.pth'
channels = [128, 256, 512, 1024]
swin = dict(embed_dims=128, num_heads=[4, 8, 16, 32], init_cfg=dict(checkpoint=pretrained))
