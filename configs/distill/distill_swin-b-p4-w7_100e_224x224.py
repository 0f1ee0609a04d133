_base_ = './distill_swin-t-p4-w7_100e_224x224.py'

swin = dict(embed_dims=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
model = dict(backbone=swin, teacher='swin_l.in22k')
