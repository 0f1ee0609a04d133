# The authors' recipe for 100 epochs: https://github.com/microsoft/SimMIM, configs/swin_base__100ep. Their rate is for
# 512 images per step and grows linearly with that number, so it is scaled to the batch size and the number of GPUs.
default_scope = 'mmengine'
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-4, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=5.0),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,  # the mask token among others
        custom_keys=dict(
            relative_position_bias_table=dict(decay_mult=0.0),
            absolute_pos_embed=dict(decay_mult=0.0),
            cpb_mlp=dict(decay_mult=0.0),
            logit_scale=dict(decay_mult=0.0),
        ),
    ),
)
auto_scale_lr = dict(enable=True, base_batch_size=512)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.005, by_epoch=True, begin=0, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.05, by_epoch=True, begin=10, end=100, convert_to_iter_based=True),
]
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=100, val_interval=5)
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=5, max_keep_ckpts=2, save_best='held_out/error', rule='less'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
custom_hooks = [dict(type='PretrainingHook')]
log_processor = dict(window_size=50)
load_from = None
resume = False
