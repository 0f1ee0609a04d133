# Drop path and normalised target are those of the authors' Swin V2-B at 192 pixels with window 12, which is the only
# recipe that they published for V2; 256 pixels and window 8 are those of their smallest weights.
_base_ = ['../_base_/models/simmim.py', '../_base_/datasets/unlabelled.py', '../_base_/schedules/simmim_100e.py']

swin = dict(type='SwinDenseV2', embed_dims=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=8)
model = dict(backbone=dict(drop_path_rate=0.1, **swin), norm_target=47)
train_dataloader = dict(dataset=dict(crop_size=256))
val_dataloader = dict(dataset=dict(crop_size=256))
