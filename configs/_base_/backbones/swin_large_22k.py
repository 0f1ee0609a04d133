# Swin-L, ImageNet-22K.
_base_ = './swin_small.py'

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_large_patch4_window7_224_22k.pth'
channels = [192, 384, 768, 1536]
swin = dict(embed_dims=192, num_heads=[6, 12, 24, 48], init_cfg=dict(checkpoint=pretrained))
