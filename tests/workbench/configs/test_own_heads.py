"""Query-based heads and box detectors with custom data: write the config, train, resume, test and predict."""

import json
import re
import shutil

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.workbench.configs.classes import set_classes
from swin_dense.workbench.configs.parts import dicts, pipelines
from tests.conftest import TINY, some
from tests.processes import cli
from tests.workbench.configs.data import CLASSES, make_coco, make_masks, mask_values, written

INSTANCES = 'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco'
SEMANTIC = 'mask2former_swin-t_8xb2-160k_ade20k-512x512'
CASCADE = 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco'
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
DINO = 'dino-5scale_swin-l_8xb2-12e_coco'
BOXES = ('faster-rcnn_swin-t-p4-w7_fpn_1x_coco', 'retinanet_swin-t-p4-w7_fpn_1x_coco', DINO)
PANOPTIC = 'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco-panoptic'
SHAPES = ['disc', 'ring', 'square', 'triangle', 'star']
STEPS, SIDE = 20, 96


def without_masks(root):
    """Remove the masks from annotations, so that only boxes remain."""
    for path in (root / 'annotations').glob('*.json'):
        content = json.loads(path.read_text())
        for annotation in content['annotations']:
            del annotation['segmentation']
        path.write_text(json.dumps(content))
    return root


@pytest.mark.parametrize(
    'name',
    [
        CASCADE,
        UPERNET,
        *some([INSTANCES, SEMANTIC, DINO, 'maskformer_swin-t_upernet_8xb2-160k_ade20k-512x512'], every=2),
    ],
)
def test_own_classes_are_set_in_heads_losses_and_data(tmp_path, name):
    is_detector = 'coco' in name
    root = (make_coco if is_detector else make_masks)(tmp_path / 'data')
    config = written(tmp_path, '--data-root', root, '--classes', ', '.join(CLASSES), name=name)
    text = (tmp_path / 'mine.py').read_text()
    assert not re.search(r'num_(things_)?classes=(80|150)\b|reduce_zero_label=True', text)
    weights = [part['class_weight'] for part in dicts(config.model) if 'class_weight' in part]
    assert weights == ([] if name in (DINO, CASCADE, UPERNET) else [[1.0, 1.0, 0.1]])
    for split in ('train', 'val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        assert (dataset.metainfo.classes, dataset.data_root) == (
            tuple(CLASSES),
            f'{root}/' if is_detector else str(root),
        )
    if is_detector:
        assert config.val_evaluator.ann_file == f'{root}/annotations/instances_val2017.json'
    else:
        assert mask_values(config) == [0, 1, 255]


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        (PANOPTIC, [], 'own classes are not supported for panoptic segmentation'),
        (INSTANCES, ['without masks'], r'instances_train2017\.json: .* this recipe needs masks'),
        (
            'knet-s3_swin-t_upernet_8xb2-adamw-80k_ade20k-512x512',
            ['class_weight=' + str([*range(1, 151)]).replace(' ', '')],
            'has different weights for its 150 classes',
        ),
    ],
)
def test_unsupported_own_classes_are_one_error_and_write_nothing(tmp_path, capsys, name, change, message):
    if change and change[0].startswith('class_weight'):
        config = written(tmp_path, name=name)
        config.model.auxiliary_head.loss_decode.class_weight = list(range(1, 151))
        name = str(tmp_path / 'weighed.py')
        config.dump(name)
    root = make_coco(tmp_path / 'fruit')
    if change == ['without masks']:
        without_masks(root)
    arguments = ['--out', str(tmp_path / 'out.py'), '--data-root', str(root), '--classes', ','.join(CLASSES)]
    assert main(['config', name, *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / 'out.py').exists()


def test_a_weight_for_no_object_is_kept_if_one_class_becomes_two():
    model = {'num_classes': 1, 'loss_cls': {'class_weight': [1.0, 0.1]}}
    config = Config({'default_scope': 'mmdet', 'model': model})
    set_classes(config, CLASSES)
    assert config.model == {'num_classes': 2, 'loss_cls': {'class_weight': [1.0, 1.0, 0.1]}}


@pytest.mark.parametrize('name', BOXES)
def test_a_box_detector_needs_no_masks(tmp_path, name):
    root = without_masks(make_coco(tmp_path / 'fruit'))
    config = written(tmp_path, '--data-root', root, '--classes', ','.join(CLASSES), name=name)
    assert 'segm' not in config.val_evaluator.metric
    detector = config.model.get('roi_head', config.model)
    assert detector.bbox_head.num_classes == 2


def shrink(config):
    """Reduce a config so that a CPU trains it in seconds: a tiny Swin, two transformer layers, small images."""
    model, side = config.model, (SIDE, SIDE)
    model.backbone.update(TINY, init_cfg=None, with_cp=False, window_size=7)
    channels = [16 * 2**stage for stage in model.backbone.get('out_indices', range(4))]
    for part in (model.get('neck'), model.get('panoptic_head'), model.get('decode_head')):
        if part is not None:
            part.in_channels = channels
    smaller = {'num_layers': 2, 'num_queries': 80, 'num_dn_queries': 10}
    for part in dicts(model):
        part.update({key: value for key, value in smaller.items() if isinstance(part.get(key), int)})
        if part.get('num_points', 0) > 1000:  # sampling points of mask losses
            part.num_points = 500
        if part.get('type') == 'BatchFixedSizePad' or (part is model.data_preprocessor and 'size' in part):
            part['size'] = side
    is_detector = config.default_scope == 'mmdet'
    left_out = (
        'RandomChoice',
        'RandomResize',
        'RandomChoiceResize',
        'Resize',
        *(['RandomCrop'] if is_detector else []),
    )
    for pipeline in pipelines(list(config.values())):
        pipeline[:] = [step for step in pipeline if step.type not in left_out]
        crops = [step for step in pipeline if step.type == 'RandomCrop']
        for step in crops:
            step.crop_size = side
        if not crops:
            loaded = [index for index, step in enumerate(pipeline) if step.type.startswith('Load')]
            after = loaded[-1] if is_detector else loaded[0]  # masks are evaluated at the original size
            pipeline.insert(after + 1, {'type': 'Resize', 'scale': side, 'keep_ratio': True})
    for split in ('train', 'val', 'test'):
        config[f'{split}_dataloader'].update(num_workers=0, persistent_workers=False)
    config.train_dataloader.batch_size = 2
    if 'max_epochs' in config.train_cfg:  # an epoch has 4 iterations
        config.train_cfg.update(max_epochs=STEPS // 4, val_interval=STEPS // 4)
        interval = 2
    else:
        config.train_cfg = {'type': 'IterBasedTrainLoop', 'max_iters': STEPS, 'val_interval': STEPS}
        interval = 8
    config.default_hooks.checkpoint.update(interval=interval, max_keep_ckpts=-1)
    config.default_hooks.logger = {'type': 'LoggerHook', 'interval': 1}
    config.optim_wrapper.optimizer = {'type': 'AdamW', 'lr': 5e-4, 'weight_decay': 0.05}
    config.param_scheduler = []
    config.randomness = {'seed': 0}
    return config


def losses(work_dir):
    """Return {step: loss} of the last run in a work directory."""
    (log,) = sorted(work_dir.glob('*/vis_data/scalars.json'))[-1:]
    lines = map(json.loads, log.read_text().splitlines())
    return {line['step']: line['loss'] for line in lines if 'loss' in line}


@pytest.fixture
def shapes(demo_data, tmp_path):
    """Copy the demo data set three times: with COCO masks, with boxes only, and with class indices from 0 in masks."""
    shutil.copytree(demo_data / 'coco', tmp_path / 'coco')
    without_masks(shutil.copytree(demo_data / 'coco', tmp_path / 'boxes'))
    shutil.copytree(demo_data / 'ADEChallengeData2016', tmp_path / 'masks')
    known = np.full(256, 255, np.uint8)
    known[[1, 120, 149, 42, 150, 83]] = range(6)  # the labels of the wall and of the five shapes
    for path in (tmp_path / 'masks' / 'annotations').rglob('*.png'):
        Image.fromarray(known[np.asarray(Image.open(path))]).save(path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ('name', 'folder'),
    [(INSTANCES, 'coco'), (SEMANTIC, 'masks'), (DINO, 'coco'), *((name, 'boxes') for name in BOXES)],
)
def test_training_resuming_testing_and_prediction(tmp_path, shapes, name, folder):
    classes = ['wall', *SHAPES] if folder == 'masks' else SHAPES
    config = written(tmp_path, '--data-root', shapes / folder, '--classes', ','.join(classes), name=name)
    shrink(config).dump(tmp_path / 'mine.py')

    cli('train', 'mine.py', '--work-dir', 'whole', cwd=tmp_path)
    whole = losses(tmp_path / 'whole')
    assert list(whole) == list(range(1, STEPS + 1))
    assert np.isfinite(list(whole.values())).all()
    if name in (INSTANCES, SEMANTIC, DINO):  # the losses of the other detectors need not fall in so few steps
        assert np.mean([whole[step] for step in range(STEPS - 4, STEPS + 1)]) < 0.9 * whole[1]

    kept, after = ('epoch_2.pth', 8) if 'max_epochs' in config.train_cfg else ('iter_8.pth', 8)
    (tmp_path / 'resumed').mkdir()
    shutil.copy(tmp_path / 'whole' / kept, tmp_path / 'resumed')
    cli('train', 'mine.py', '--work-dir', 'resumed', '--resume', f'resumed/{kept}', cwd=tmp_path)
    resumed = losses(tmp_path / 'resumed')
    assert list(resumed) == list(range(after + 1, STEPS + 1))

    last = f'whole/epoch_{STEPS // 4}.pth' if 'max_epochs' in config.train_cfg else f'whole/iter_{STEPS}.pth'
    tested = cli('test', 'mine.py', last, cwd=tmp_path)
    # RetinaNet may not detect anything yet; mmdet then reports it instead of an AP.
    assert re.search('mIoU' if folder == 'masks' else 'coco/bbox_mAP|whole dataset is empty', tested.stdout)
    picture = next((shapes / folder).rglob('val*/*.jpg'))
    cli('predict', 'mine.py', last, picture, '--out', 'seen', '--score', '0.01', cwd=tmp_path)
    record = json.loads((tmp_path / 'seen' / f'{picture.stem}.json').read_text())
    assert {part['class'] for part in record['segments' if folder == 'masks' else 'instances']} <= set(classes)
