# Images without labels: a folder, a pattern, a tar file, or a .txt file that lists them. Their location: the
# environment variable PHOTOS_ROOT, or the default path in the working directory. A twentieth of them is held out.
# scale divides the stored values, such as 10000 for reflectance, and page chooses one of a TIFF with several.
data_root = '{{$PHOTOS_ROOT:data/photos}}'
photos = dict(
    type='UnlabelledImages', data_root=data_root, crop_size=192, in_channels=3, held_out=0.05, scale=None, page=None
)
loader = dict(batch_size=64, num_workers=4, persistent_workers=True, collate_fn=dict(type='default_collate'))
train_dataloader = dict(
    sampler=dict(type='DefaultSampler', shuffle=True), dataset=dict(split='train', **photos), **loader
)
val_dataloader = dict(
    sampler=dict(type='DefaultSampler', shuffle=False), dataset=dict(split='held_out', **photos), **loader
)
val_cfg = dict(type='ValLoop')
val_evaluator = dict(type='HeldOutLoss')
