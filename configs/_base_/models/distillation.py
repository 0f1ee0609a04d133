# The loss of AM-RADIO, https://arxiv.org/abs/2312.06709, on all levels of the backbone. The teacher is a name for
# swin_dense.pretraining.teacher_sources.load_teacher; `swin-dense config --teacher` sets another.
custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)

mean = [0.485, 0.456, 0.406]  # of ImageNet, on the scale 0 to 1; one number per channel
std = [0.229, 0.224, 0.225]
model = dict(
    type='FeatureDistillationPretrainer',
    backbone=dict(clamp_window=True, drop_path_rate=0.0, init_cfg=None),
    mask_patch=32,
    mask_ratio=0.0,
    data_preprocessor=dict(type='ImageNormalizer', mean=mean, std=std),
)
