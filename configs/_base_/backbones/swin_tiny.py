# Swin-T, ImageNet-1K. Configs with this file in `_base_` use `_base_.swin` as their backbone and `_base_.channels` as
# the input channels of the neck or head. The addresses of the weights in this folder come from the README of
# https://github.com/microsoft/Swin-Transformer. Only this file of weights has a published hash, given after #, in
# Intel's Open Model Zoo, models/public/swin-tiny-patch4-window7-224/model.yml.
custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)

pretrained = (
    'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth'
    '#sha384=210021216e1f205617d885836b1ac59d725b8c41dbff8dc4c513e838911436b0b75e06529737e472d3167519a7c1a6ad'
)
channels = [96, 192, 384, 768]
swin = dict(
    type='SwinDense',
    embed_dims=96,
    depths=[2, 2, 6, 2],
    num_heads=[3, 6, 12, 24],
    window_size=7,
    init_cfg=dict(type='Pretrained', checkpoint=pretrained),
)
