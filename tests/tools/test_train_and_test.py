"""`swin-dense train` and `test`, and the tools that call them, run as programs on a few images."""

import json
import pickle
import re

import pytest
from mmengine.runner import CheckpointLoader
from PIL import Image

import swin_dense  # noqa: F401  lets mmengine read its checkpoints
from tests.conftest import ROOT, some
from tests.processes import cli, python

CONFIGS = {
    'mmdet': ROOT / 'configs/demo/mask-rcnn_swin-demo_fpn.py',
    'mmseg': ROOT / 'configs/demo/upernet_swin-demo.py',
}
SHORT = {
    'mmdet': ['train_cfg.max_epochs=2', 'train_cfg.val_interval=2', 'default_hooks.checkpoint.interval=1'],
    'mmseg': [
        'train_cfg.max_iters=4', 'train_cfg.val_interval=4', 'default_hooks.checkpoint.interval=2',
        'train_dataloader.batch_size=2',
    ],
}  # fmt: skip
LAST = {'mmdet': 'epoch_2.pth', 'mmseg': 'iter_4.pth'}


def options(framework, data):
    root = f'{data}/coco/' if framework == 'mmdet' else f'{data}/ADEChallengeData2016'
    found = [f'{split}_dataloader.dataset.data_root={root}' for split in ('train', 'val', 'test')]
    if framework == 'mmdet':
        found += [f'{split}_evaluator.ann_file={root}annotations/instances_val2017.json' for split in ('val', 'test')]
    return [*found, 'default_hooks.logger.interval=1']


def losses(log):
    return [float(loss) for loss in re.findall(r'(?:Epoch|Iter)\(train\).*? loss: ([\d.]+)', log)]


@pytest.fixture(scope='module', params=some(['mmdet', 'mmseg'], every=2))
def trained(request, demo_data, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('work dir')
    common = [
        '--work-dir',
        work_dir,
        '--set',
        *options(request.param, demo_data),
        *SHORT[request.param],
    ]
    log = cli('train', CONFIGS[request.param], *common).stdout
    return request.param, work_dir, log, common


@pytest.mark.slow
def test_training_writes_a_checkpoint_that_mmengine_reads(trained):
    framework, work_dir, log, _ = trained
    assert len(losses(log)) == 4
    assert (work_dir / LAST[framework]).is_file()
    assert re.search(r'coco/segm_mAP_50|mIoU', log)
    assert CheckpointLoader.load_checkpoint(str(work_dir / LAST[framework]))['meta']['experiment_name']


@pytest.mark.slow
def test_testing_writes_metrics_predictions_and_pictures(trained, tmp_path):
    framework, work_dir, _, common = trained
    out = tmp_path / ('predictions.pkl' if framework == 'mmdet' else 'label maps')
    given = ['--out', out, '--show-dir', tmp_path / 'shown', '--work-dir', tmp_path, *common[2:]]
    python(
        '-W',
        'ignore',
        ROOT / 'tools/test.py',
        CONFIGS[framework],
        work_dir / LAST[framework],
        *given,
    )
    report = json.loads(next(tmp_path.glob('*/*.json')).read_text())
    assert {'coco/bbox_mAP_50', 'coco/segm_mAP_50'} <= set(report) or 'mIoU' in report
    count = len(pickle.loads(out.read_bytes())) if framework == 'mmdet' else len(list(out.glob('*.png')))
    shown = [path for path in (tmp_path / 'shown').rglob('*') if path.suffix in ('.jpg', '.png')]
    assert (count, len(shown)) == (4, 4)


# mmdet's bases have no test-time augmentation, those of mmseg have.
WITH_FLIPS = """
_base_ = {base!r}
tta_model = dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
flips = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale_factor=1.0, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='TestTimeAug', transforms=[flips, [dict(type='PackDetInputs', meta_keys=meta_keys)]]),
]
"""


@pytest.mark.slow
@pytest.mark.long
def test_test_time_augmentation(trained, tmp_path):
    framework, work_dir, _, common = trained
    common = ['--work-dir', tmp_path, *common[2:]]
    config = CONFIGS[framework]
    if framework == 'mmdet':
        config = tmp_path / 'with_flips.py'
        config.write_text(WITH_FLIPS.format(base=str(CONFIGS[framework])))
    cli('test', config, work_dir / LAST[framework], '--tta', *common)
    report = json.loads(next(tmp_path.glob('*/*.json')).read_text())
    assert 'coco/bbox_mAP_50' in report or 'mIoU' in report
    assert 'coco/segm_mAP_50' not in report


@pytest.mark.slow
@pytest.mark.long
def test_the_quick_demo_writes_a_summary_and_pictures(tmp_path):
    out = tmp_path / 'demo of mine'
    done = python('-W', 'ignore', ROOT / 'tools/demo.py', out, '--quick')
    summary = json.loads((out / 'summary.json').read_text())
    assert {'coco/bbox_mAP_50', 'coco/segm_mAP_50', 'mIoU', 'seconds', 'versions'} <= set(summary)
    assert set(summary['seconds']) >= {'data', 'mask_rcnn/train', 'mask_rcnn/test', 'upernet/train', 'pyramid'}
    assert summary['versions']['torch'].startswith('2.')
    for name in ('mask_rcnn.png', 'upernet.png', 'pyramid.png'):
        with Image.open(out / name) as picture:
            assert min(picture.size) > 100
    assert re.search(r'4/4, loss [\d.]+, \S+ left', done.stdout)  # progress was shown


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([CONFIGS['mmdet'], '--set', 'train_dataloader.dataset.data_root=nowhere'], 'no nowhere/'),
        ([CONFIGS['mmdet'], '--set', 'train_cfg=None'], 'the config has no train_cfg'),
        ([CONFIGS['mmdet'], '--work-dir', 'file/x'], 'file/x must be a folder, but file is a file'),
        (['mask-rcnn_swin-t-p4-w7_fpn_1x_coco'], 'variables COCO_ROOT'),
    ],
)
def test_wrong_arguments_are_explained_in_one_line(arguments, message, tmp_path):
    (tmp_path / 'file').touch()
    done = cli('train', *arguments, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(re.findall('error: ', done.stderr)) == 1
