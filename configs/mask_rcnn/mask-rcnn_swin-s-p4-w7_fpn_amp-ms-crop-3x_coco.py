_base_ = './mask-rcnn_swin-s-p4-w7_fpn_ms-crop-3x_coco.py'

optim_wrapper = dict(type='AmpOptimWrapper')
