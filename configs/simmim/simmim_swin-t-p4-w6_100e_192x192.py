_base_ = ['../_base_/models/simmim.py', '../_base_/datasets/unlabelled.py', '../_base_/schedules/simmim_100e.py']

swin = dict(type='SwinDense', embed_dims=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=6)
model = dict(backbone=swin)
