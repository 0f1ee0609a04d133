_base_ = 'mmdet::_base_/datasets/coco_detection.py'

# Location of COCO: the environment variable COCO_ROOT, or data/coco in the working directory.
data_root = '{{$COCO_ROOT:data/coco}}/'
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator
