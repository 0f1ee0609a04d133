_base_ = ['../_base_/models/simmim.py', '../_base_/datasets/unlabelled.py', '../_base_/schedules/simmim_100e.py']

swin = dict(type='SwinDense', embed_dims=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], window_size=6)
model = dict(backbone=swin)
