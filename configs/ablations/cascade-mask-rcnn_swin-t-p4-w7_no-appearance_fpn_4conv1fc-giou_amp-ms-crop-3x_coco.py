_base_ = '../cascade_mask_rcnn/cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'

model = dict(backbone=dict(qk_scale=0.0, init_cfg=None))
