# The authors' recipe on COCO: half precision, and a warm-up of 500 iterations instead of mmdet's 1000.
_base_ = './coco_3x.py'

optim_wrapper = dict(type='AmpOptimWrapper')
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    _base_.param_scheduler[1],
]
