"""`swin-dense config`: the written file equals the recipe, and the frameworks' tools train it with custom data."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config

from swin_dense.commands._main import main
from swin_dense.workbench.configs.settings import merge_settings, parse_settings
from swin_dense.workbench.recipes.files import load_recipe
from tests.conftest import ROOT
from tests.processes import completed
from tests.workbench.configs.data import CLASSES, SPLITS, VAL, dataset_of, make_coco, written

DETECTOR = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
SEGMENTOR = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
CASCADE = 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco'
EMPTY = "default_scope = 'mmseg'\nmodel = dict()"
ONE_PER_FOLDER = [DETECTOR, SEGMENTOR, CASCADE, 'retinanet_swin-t-p4-w7_fpn_1x_coco', 'upernet_swin-demo']

write = partial(written, name=DETECTOR)


def plain(value):
    """Return a config as plain Python types, without the scopes that mmengine adds to bases."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != '_scope_'}
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize('name', ONE_PER_FOLDER)
def test_the_written_config_equals_the_recipe(tmp_path, name):
    written = plain(write(tmp_path, name=name)._cfg_dict)
    (path,) = (ROOT / 'configs').glob(f'*/{name}.py')
    recipe = plain(Config.fromfile(path)._cfg_dict)
    assert written == {key: recipe[key] for key in written}
    assert {'model', 'train_dataloader', 'test_evaluator', 'optim_wrapper', 'custom_imports'} <= set(written)
    assert not {'swin', 'channels', 'data_root', 'train_pipeline'} & set(written)  # intermediate variables
    assert 'mmdet::' not in (tmp_path / 'mine.py').read_text()


WRAPPED = """_base_ = '{root}/configs/mask_rcnn/{name}.py'
inner = _base_.train_dataloader.dataset
train_dataloader = dict(dataset=dict(_delete_=True, type='RepeatDataset', times=3, dataset=dict(
    type='ConcatDataset', datasets=[inner, dict(type='ClassBalancedDataset', oversample_thr=1e-3, dataset=inner)])))
"""


def test_nested_data_set_wrappers(fruit, tmp_path):
    """The data set holds the 4 images twice, once class-balanced without a rare class, and repeats them three times."""
    (tmp_path / 'wrapped.py').write_text(WRAPPED.format(root=ROOT, name=DETECTOR))
    config = fruit.write(name=tmp_path / 'wrapped.py')
    once, balanced = config.train_dataloader.dataset.dataset.datasets
    once.pipeline = balanced.dataset.pipeline = []
    dataset = dataset_of(config, 'train')
    assert len(dataset) == 3 * (4 + 4)
    assert dataset.metainfo['classes'] == tuple(CLASSES)
    labels = [dataset.get_data_info(index)['instances'][0]['bbox_label'] for index in range(8)]
    assert labels == [0, 1] * 4


def test_a_written_config_can_be_rewritten(fruit, tmp_path):
    """A written config has no intermediate entries such as data_root; its data sets can still be replaced."""
    fruit.write(name=DETECTOR)
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    other = make_coco(tmp_path / 'other fruit')
    config = write(
        tmp_path,
        '--data-root',
        other,
        '--classes',
        CLASSES[0],
        name=tmp_path / 'first.py',
    )
    assert {config[f'{split}_dataloader'].dataset.data_root for split in SPLITS} == {f'{other}/'}
    assert config.test_evaluator.ann_file == f'{other}/{VAL}'
    assert config.model.roi_head.bbox_head.num_classes == 1


@pytest.mark.parametrize(
    ('text', 'options', 'message'),
    [
        ('model = dict(', '', 'cannot be read as a config (SyntaxError'),
        ('x = undefined', '', "cannot be read as a config (NameError: name 'undefined'"),
        ("_base_ = 'missing.py'", '', 'cannot be read as a config (FileNotFoundError'),
        ('from mmengine.model import BaseModel\nmodel = dict(type=BaseModel)', '', "must have default_scope = 'mmdet'"),
        ('model = dict(type=3)', '', 'the type of each part of a config must be a name or a class, got 3'),
        ('model = dict()', '', "must have default_scope = 'mmdet' or 'mmseg', got None"),
        ("default_scope = 'mmseg'", '', 'model must be a dict, got None'),
        (f'{EMPTY}\ntrain_dataloader = 3', '', 'train_dataloader must be a dict'),
        (f'{EMPTY}\ntrain_cfg = 3', '', 'train_cfg must be a dict, got 3'),
        (
            f'{EMPTY}\nval_dataloader = dict(dataset=dict(data_root=1))',
            '',
            'data_root of val_dataloader.dataset must be a str, got 1',
        ),
        (EMPTY, '--data-root .', 'the data root can be replaced only if'),
        (EMPTY, '--classes a,b', 'no part of the model has num_classes'),
        (EMPTY, '--set model=3', 'model=3 cannot replace a dict'),
    ],
)
def test_invalid_configs_are_refused(tmp_path, capsys, text, options, message):
    (tmp_path / 'other.py').write_text(f'{text}\n')
    assert main(['config', str(tmp_path / 'other.py'), '--out', str(tmp_path / 'mine.py'), *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'mine.py').exists()


def test_a_checkpoint_in_the_place_of_a_config(tmp_path, capsys):
    (tmp_path / 'a.pth').touch()
    assert main(['config', str(tmp_path / 'a.pth')]) == 2
    assert 'a.pth is not a config, which ends in .py, .json, .yaml or .yml' in capsys.readouterr().err


def test_settings(tmp_path):
    settings = ['model.backbone.with_cp=True', 'load_from=my weights/a.pth']
    config = write(tmp_path, '--set', *settings, '--set', 'val_dataloader.dataset.ann_file=other.json')
    assert config.model.backbone.with_cp is True
    assert config.load_from == 'my weights/a.pth'
    assert config.val_dataloader.dataset.ann_file == 'other.json'
    # mmseg's `inference_model` reads the entry `test_pipeline`; its Inferencer reads the pipeline of the data set.
    scale = 'test_dataloader.dataset.pipeline.1.scale=(640,400)'
    config = write(tmp_path, '--set', scale, name=SEGMENTOR)
    assert config.test_pipeline[1].scale == (640, 400)


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('model.backbone.init_cfg', {'type': 'Pretrained', 'checkpoint': 'a.pth'}),
        ('model.train_cfg.new.entry', {'a': {'b': 1}}),
        ('model.train_cfg.rpn', {'a': 1}),
        ('train_dataloader.dataset.pipeline.0', {'type': 'LoadBands'}),
        ('param_scheduler.0', {'type': 'ConstantLR', 'factor': 1.0}),
        ('model.neck.in_channels.3', 7),
    ],
)
def test_a_dict_is_a_new_entry_or_replaces_one_also_in_a_list(key, value):
    config = load_recipe(DETECTOR)
    merge_settings(config, [f'{key}={value}'])
    entry = config
    for name in key.split('.'):
        entry = entry[int(name)] if isinstance(entry, list) else entry[name]
    assert entry == value


def test_a_dict_below_a_key_with_the_same_name_as_its_path():
    """mmengine's patterns of parameters have dots in their names, which a setting cannot address."""
    patterns = {'backbone.norm': {'decay_mult': 0.0}, 'backbone': {}}
    config = Config({'optim_wrapper': {'paramwise_cfg': {'custom_keys': patterns}}})
    merge_settings(config, ["optim_wrapper.paramwise_cfg.custom_keys.backbone.norm={'lr_mult': 0.1}"])
    keys = config.optim_wrapper.paramwise_cfg.custom_keys
    assert keys == {'backbone.norm': {'decay_mult': 0.0}, 'backbone': {'norm': {'lr_mult': 0.1}}}


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


def test_a_missing_data_file_is_reported_once(fruit):
    """It is that of validation and test."""
    (fruit.root / VAL).unlink()
    assert fruit.refused().count(VAL) == 1


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['no-such-recipe'], "no recipe and no config file 'no-such-recipe'"),
        ([DETECTOR + 'o'], f'did you mean {DETECTOR!r}?'),
        (['mask-rcnn_swin-t'], "did you mean 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'mask-rcnn_swin-t-p4-"),
        ([DETECTOR, '--classes', 'apple,apple'], 'must be distinct'),
        ([DETECTOR, '--classes', 'apple,'], 'must be distinct'),
        ([SEGMENTOR, '--classes', 'road'], 'at least two classes'),
        ([DETECTOR, '--set', 'model'], 'must be KEY=VALUE'),
        ([DETECTOR, '--set', 'modle.x=1'], "got 'modle'; did you mean 'model'?"),
        ([DETECTOR, '--set', 'model.backbone={with_cp'], 'is neither a value of Python nor of YAML'),
        (
            [DETECTOR, '--data-root', 'fruit', '--classes', 'apple,cherry'],
            '2 classes, apple, ripe pear, but the config has 2',
        ),
        ([DETECTOR, '--data-root', 'fruit'], '2 classes, apple, ripe pear, but the config has 80, person'),
    ],
)
def test_invalid_arguments_write_nothing(fruit, monkeypatch, capsys, words, message):
    monkeypatch.chdir(fruit.beside)
    assert main(['config', *words, '--out', 'mine.py']) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in fruit.beside.iterdir()] == ['fruit']


def test_a_setting_that_nothing_reads_is_refused_or_said(fruit, tmp_path, capsys, monkeypatch):
    """mmengine takes any name, and a training goes on as if the setting had not been given."""
    monkeypatch.setattr('mmengine.registry.RUNNERS.build', lambda config: SimpleNamespace(train=lambda: None))
    fruit.write()
    path = tmp_path / 'mine.py'
    path.write_text(f'{path.read_text()}\nmax_epochs = 12\n')  # as in a config whose train_cfg takes this value
    words = ['train', str(path), '--work-dir', str(tmp_path / 'work'), '--set']
    assert main([*words, 'max_epochs=1', 'log_level=INFO']) == 0
    said = capsys.readouterr().err
    assert said.count('--set max_epochs changes an entry that no runner or tool reads') == 1
    assert 'log_level' not in said
    assert main([*words, 'max_epoch=1']) == 2
    assert "got 'max_epoch'; did you mean 'max_epochs'?" in capsys.readouterr().err


def test_a_missing_framework_is_named(monkeypatch, capsys):
    monkeypatch.setattr('swin_dense.workbench.recipes.files.find_spec', lambda name: None)
    assert main(['config', DETECTOR]) == 2
    assert 'inherits from configs of mmdet, which is not installed' in capsys.readouterr().err


DETECTION = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'param_scheduler.1.end=1']
SEGMENTATION = [
    'train_cfg.max_iters=2',
    'train_cfg.val_interval=2',
    'train_dataloader.batch_size=2',
    'train_dataloader.dataset.pipeline.2.crop_size=(64,64)',
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ('framework', 'data', 'settings'),
    [('mmdet', 'fruit', DETECTION), ('mmseg', 'roads', SEGMENTATION)],
)
def test_the_frameworks_tools_train_and_test_a_written_config(request, tmp_path, framework, data, settings):
    request.getfixturevalue(data).write('--set', *settings, 'log_level=INFO')
    tools = Path(importlib.import_module(framework).__path__[0], '.mim', 'tools')

    def run(tool, *arguments):
        # Outside the repository, so that only the written file and the installed packages are used.
        done = completed([sys.executable, '-W', 'ignore', tools / tool, 'mine.py', *arguments], cwd=tmp_path)
        return re.findall(r'(?:coco/segm_mAP|mIoU): ([\d.-]+)', done.stdout)

    metrics = run('train.py', '--work-dir', 'work')
    assert metrics
    (checkpoint,) = (tmp_path / 'work').glob('*.pth')
    assert run('test.py', checkpoint) == metrics
