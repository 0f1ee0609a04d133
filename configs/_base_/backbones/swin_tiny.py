# Swin-T, ImageNet-1K. A config that lists this file takes `_base_.swin` as its backbone and `_base_.channels`
# for whatever reads the four maps. The addresses of the weights here and beside are those that the README of
# https://github.com/microsoft/Swin-Transformer gives.
custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)

pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth'
channels = [96, 192, 384, 768]
swin = dict(
    type='SwinDense',
    embed_dims=96,
    depths=[2, 2, 6, 2],
    num_heads=[3, 6, 12, 24],
    window_size=7,
    init_cfg=dict(type='Pretrained', checkpoint=pretrained),
)
