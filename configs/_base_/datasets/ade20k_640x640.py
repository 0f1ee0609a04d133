_base_ = 'mmseg::_base_/datasets/ade20k_640x640.py'

# Location of ADE20K: the environment variable ADE20K_ROOT, or the default path in the working directory.
data_root = '{{$ADE20K_ROOT:data/ade/ADEChallengeData2016}}'
train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
