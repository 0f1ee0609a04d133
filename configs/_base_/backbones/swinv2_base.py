# Swin V2-B, ImageNet-1K at 256x256 with window 8.
_base_ = './swinv2_small.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v2.0.0/swinv2_base_patch4_window8_256.pth'
channels = [128, 256, 512, 1024]
swin = dict(embed_dims=128, num_heads=[4, 8, 16, 32], init_cfg=dict(checkpoint=pretrained))
