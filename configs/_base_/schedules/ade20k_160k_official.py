# The authors' recipe on ADE20K: the decay to 0 starts at the first iteration, during the warm-up.
_base_ = './ade20k_160k.py'

param_scheduler = [
    _base_.param_scheduler[0],
    dict(type='PolyLR', eta_min=0.0, power=1.0, begin=0, end=160000, by_epoch=False),
]
