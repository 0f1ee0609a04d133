# Shared by the demo configs: a Swin small enough to be trained from scratch on a CPU in minutes.
custom_imports = dict(imports=['swin_dense'], allow_failed_imports=False)

swin = dict(
    _delete_=True,
    type='SwinDense',
    embed_dims=32,
    depths=(2, 2, 2, 2),
    num_heads=(1, 2, 4, 8),
    drop_path_rate=0.0,
)
channels = [32, 64, 128, 256]

adamw = dict(
    _delete_=True,
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys={
            'absolute_pos_embed': dict(decay_mult=0.0),
            'relative_position_bias_table': dict(decay_mult=0.0),
            'norm': dict(decay_mult=0.0),
        }
    ),
    clip_grad=dict(max_norm=10.0),
)
randomness = dict(seed=0)
