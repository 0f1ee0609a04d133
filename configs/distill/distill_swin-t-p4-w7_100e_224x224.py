# The schedule is that of the recipes for SimMIM; nobody has published one for this loss and Swin.
_base_ = ['../_base_/models/distillation.py', '../_base_/datasets/unlabelled.py', '../_base_/schedules/simmim_100e.py']

swin = dict(type='SwinDense', embed_dims=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7)
model = dict(backbone=swin, teacher='swin_b.in22k')
train_dataloader = dict(dataset=dict(crop_size=224))
val_dataloader = dict(dataset=dict(crop_size=224))
val_evaluator = dict(loss='loss_features')
custom_hooks = [dict(type='PretrainingHook', loss='loss_features')]
