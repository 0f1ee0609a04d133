"""`swin-dense config`: the written file equals the recipe, and the frameworks' tools train it with custom data."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import mmdet
import mmseg
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope

from swin_dense.commands._main import main
from swin_dense.workbench.configs.settings import parse_settings
from swin_dense.workbench.recipes.files import recipe_names
from tests.conftest import ROOT
from tests.workbench.configs.data import CLASSES, make_coco, make_masks, written

DETECTOR = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
SEGMENTOR = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
CASCADE = 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco'
ONE_PER_FOLDER = [DETECTOR, SEGMENTOR, CASCADE, 'retinanet_swin-t-p4-w7_fpn_1x_coco', 'upernet_swin-demo']


write = partial(written, name=DETECTOR)


def plain(value):
    """Return a config as plain Python types, without the scopes that mmengine adds to bases."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != '_scope_'}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize('name', ONE_PER_FOLDER)
def test_the_written_config_equals_the_recipe(tmp_path, name):
    written = plain(write(tmp_path, name=name)._cfg_dict)
    (path,) = (ROOT / 'configs').glob(f'*/{name}.py')
    recipe = plain(Config.fromfile(path)._cfg_dict)
    assert written == {key: recipe[key] for key in written}
    assert {'model', 'train_dataloader', 'test_evaluator', 'optim_wrapper', 'custom_imports'} <= set(written)
    assert not {'swin', 'channels', 'data_root', 'train_pipeline'} & set(written)  # intermediate variables
    assert 'mmdet::' not in (tmp_path / 'mine.py').read_text()


def test_the_test_pipeline_equals_that_of_the_test_data(tmp_path):
    """mmseg's `inference_model` reads the entry `test_pipeline`; its Inferencer reads the pipeline of the data set."""
    scale = 'test_dataloader.dataset.pipeline.1.scale=(640,400)'
    config = write(tmp_path, '--set', scale, name=SEGMENTOR)
    assert config.test_pipeline[1].scale == (640, 400)


def test_recipe_names_are_unique():
    assert len(set(recipe_names())) == len(recipe_names()) >= 27


WRAPPED = """_base_ = '{root}/configs/mask_rcnn/{name}.py'
inner = _base_.train_dataloader.dataset
train_dataloader = dict(dataset=dict(_delete_=True, type='RepeatDataset', times=3, dataset=dict(
    type='ConcatDataset', datasets=[inner, dict(type='ClassBalancedDataset', oversample_thr=1e-3, dataset=inner)])))
"""


def test_nested_data_set_wrappers(tmp_path):
    """The data set holds the 4 images twice, once class-balanced without a rare class, and repeats them three times."""
    (tmp_path / 'wrapped.py').write_text(WRAPPED.format(root=ROOT, name=DETECTOR))
    root = make_coco(tmp_path / 'fruit')
    config = write(tmp_path, '--data-root', root, '--classes', ','.join(CLASSES), name=tmp_path / 'wrapped.py')
    init_default_scope('mmdet')
    wrapped = config.train_dataloader.dataset
    for part in (wrapped.dataset.datasets[0], wrapped.dataset.datasets[1].dataset):
        part.pipeline = []
    dataset = DATASETS.build(wrapped)
    assert len(dataset) == 3 * (4 + 4)
    assert dataset.metainfo['classes'] == tuple(CLASSES)
    assert [dataset.get_data_info(index)['instances'][0]['bbox_label'] for index in range(8)] == [0, 1] * 4


def test_a_written_config_can_be_rewritten(tmp_path):
    """A written config has no intermediate entries such as data_root; its data sets can still be replaced."""
    write(tmp_path, '--data-root', make_coco(tmp_path / 'fruit'), '--classes', ','.join(CLASSES))
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    other = make_coco(tmp_path / 'other fruit')
    config = write(tmp_path, '--data-root', other, '--classes', CLASSES[0], name=tmp_path / 'first.py')
    assert {config[f'{split}_dataloader'].dataset.data_root for split in ('train', 'val', 'test')} == {f'{other}/'}
    assert config.test_evaluator.ann_file == f'{other}/annotations/instances_val2017.json'
    assert config.model.roi_head.bbox_head.num_classes == 1


@pytest.mark.parametrize(
    ('lines', 'options', 'message'),
    [
        (['model = dict('], [], 'cannot be read as a config (SyntaxError'),
        (['x = undefined'], [], "cannot be read as a config (NameError: name 'undefined'"),
        (["_base_ = 'missing.py'"], [], 'cannot be read as a config (FileNotFoundError'),
        (['from mmengine.model import BaseModel', 'model = dict(type=BaseModel)'], [], 'lazy configs, which'),
        (["default_scope = 'mmdet'", 'model = dict()'], ['--data-root', 'a'], 'got no dataset'),
        (['model = dict()'], [], "must have default_scope = 'mmdet' or 'mmseg', got None"),
        (["default_scope = 'mmseg'"], [], 'model must be a dict, got None'),
        (
            ["default_scope = 'mmseg'", 'model = dict()'],
            ['--set', 'model=3', 'model.a.b=1'],
            'model.a.b=1 cannot be set in this config',
        ),
        (["default_scope = 'mmseg'", 'model = dict()', 'train_dataloader = 3'], [], 'train_dataloader must be a dict'),
        (["default_scope = 'mmseg'", 'model = dict()'], ['--data-root', 'x'], 'the data root can be replaced only if'),
        (["default_scope = 'mmseg'", 'model = dict()'], ['--classes', 'a,b'], 'no part of the model has num_classes'),
        (
            ["default_scope = 'mmdet'", 'model = dict()', 'val_dataloader = dict(dataset=dict(data_root=1))'],
            [],
            'data_root of a data set must be a str, got 1',
        ),
    ],
)
def test_invalid_configs_are_refused(tmp_path, capsys, lines, options, message):
    (tmp_path / 'other.py').write_text('\n'.join(lines) + '\n')
    assert main(['config', str(tmp_path / 'other.py'), '--out', str(tmp_path / 'mine.py'), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'mine.py').exists()


def test_settings(tmp_path):
    settings = [
        'model.backbone.with_cp=True',
        'load_from=my weights/a.pth',
        'val_dataloader.dataset.ann_file=other.json',
    ]
    config = write(tmp_path, '--set', *settings[:2], '--set', settings[2])
    assert config.model.backbone.with_cp is True
    assert config.load_from == 'my weights/a.pth'
    assert config.val_dataloader.dataset.ann_file == 'other.json'


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ('apple,traffic light', ['apple', 'traffic light']),
        ('[ apple , traffic light ]', ['apple', 'traffic light']),
        ('( 640, 400 )', (640, 400)),
        ('[(1, 2), [a b, c]]', [[1, 2], ['a b', 'c']]),
        ('my photos (1)/a b.json', 'my photos (1)/a b.json'),
        ("{'type': 'Pretrained', 'checkpoint': 'a b.pth'}", {'type': 'Pretrained', 'checkpoint': 'a b.pth'}),
        (' None ', None),
    ],
)
def test_settings_keep_the_spaces_inside_names_and_paths(text, value):
    assert parse_settings([f'key={text}']) == {'key': value}


def test_random_weights_can_be_undone(tmp_path):
    """A dict replaces the None that an earlier setting wrote."""
    write(tmp_path, '--set', 'model.backbone.init_cfg=None')
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    weights = {'type': 'Pretrained', 'checkpoint': 'my weights/swin.pth'}
    config = write(tmp_path, '--set', f'model.backbone.init_cfg={weights}', name=str(tmp_path / 'first.py'))
    assert config.model.backbone.init_cfg == weights


def test_a_missing_data_file_is_reported_once(tmp_path, capsys):
    root = make_coco(tmp_path / 'fruit')
    (root / 'annotations' / 'instances_val2017.json').unlink()
    write(tmp_path, '--data-root', root, '--classes', 'apple')
    assert capsys.readouterr().err.count('does not exist') == 1


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['no-such-recipe'], "no recipe and no config file 'no-such-recipe'"),
        ([DETECTOR + 'o'], f'did you mean {DETECTOR!r}?'),
        ([DETECTOR, '--classes', 'apple,apple'], 'must be distinct'),
        ([DETECTOR, '--classes', 'apple,'], 'must be distinct'),
        ([SEGMENTOR, '--classes', 'road'], 'at least two classes'),
        ([DETECTOR, '--set', 'model'], 'must be KEY=VALUE'),
        ([DETECTOR, '--set', 'modle.x=1'], "got 'modle'; did you mean 'model'?"),
        ([DETECTOR, '--set', 'model.backbone={{with_cp'], 'is neither a value of Python nor of YAML'),
        (
            [DETECTOR, '--data-root', '{fruit}', '--classes', 'apple,cherry'],
            '2 classes, apple, ripe pear, but the config has 2',
        ),
        ([DETECTOR, '--data-root', '{fruit}'], '2 classes, apple, ripe pear, but the config has 80, person'),
    ],
)
def test_invalid_arguments_write_nothing(tmp_path, capsys, arguments, message):
    fruit = make_coco(tmp_path / 'fruit')
    arguments = [argument.format(fruit=fruit) for argument in arguments]
    assert main(['config', *arguments, '--out', str(tmp_path / 'mine.py')]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['fruit']


def test_a_missing_framework_is_named(monkeypatch, capsys):
    monkeypatch.setattr('swin_dense.workbench.recipes.files.find_spec', lambda name: None)
    assert main(['config', DETECTOR]) == 2
    assert 'inherits from configs of mmdet, which is not installed' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('framework', [mmdet, mmseg], ids=lambda module: module.__name__)
def test_the_frameworks_tools_train_and_test_a_written_config(tmp_path, framework):
    if framework is mmdet:
        data, name = make_coco(tmp_path / 'data'), 'mask-rcnn_swin-demo_fpn'
        settings = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'param_scheduler.1.end=1']
    else:
        data, name = make_masks(tmp_path / 'data'), 'upernet_swin-demo'
        settings = ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2']
        settings += [f'train_dataloader.dataset.pipeline.2.crop_size=({64},{64})']
    classes = ','.join(CLASSES)
    write(tmp_path, '--data-root', data, '--classes', classes, '--set', *settings, 'log_level=INFO', name=name)

    def run(tool, *arguments):
        # Outside the repository, so that only the written file and the installed packages are used.
        path = Path(framework.__path__[0], '.mim', 'tools', tool)
        command = [sys.executable, '-W', 'ignore', path, 'mine.py', *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r'(?:coco/segm_mAP|mIoU): ([\d.-]+)', done.stdout)

    metrics = run('train.py', '--work-dir', 'work')
    assert metrics
    (checkpoint,) = (tmp_path / 'work').glob('*.pth')
    assert run('test.py', checkpoint) == metrics
