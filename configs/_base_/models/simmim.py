# Sizes of mask cells and other options: https://github.com/microsoft/SimMIM.
custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)

mean = [0.485, 0.456, 0.406]  # of ImageNet, on the scale 0 to 1; one number per channel
std = [0.229, 0.224, 0.225]
model = dict(
    type='SimMIMPretrainer',
    backbone=dict(clamp_window=True, out_indices=(3,), drop_path_rate=0.0, init_cfg=None),
    mask_patch=32,
    mask_ratio=0.6,
    data_preprocessor=dict(type='ImageNormalizer', mean=mean, std=std),
)
