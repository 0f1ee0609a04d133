"""Custom data sets: options set their paths, and defects of the data are one error before training."""

import re
import shutil
from functools import partial

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, TRANSFORMS, init_default_scope
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.workbench.configs.checking import check_data
from swin_dense.workbench.recipes.files import load_recipe
from tests.processes import cli
from tests.workbench.configs.data import (
    CLASSES,
    DETECTOR,
    SEGMENTOR,
    make_camvid,
    make_coco,
    make_masks,
    mask_values,
    written,
)

CAMVID = 'Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist'
FOLDERS = ['--train-images', 'train', '--train-masks', 'trainannot', '--val-images', 'val', '--val-masks', 'valannot']


write = partial(written, name=SEGMENTOR)


def camvid(tmp_path, *arguments, **options):
    root = make_camvid(tmp_path / 'CamVid', **options)
    return root, write(tmp_path, '--data-root', root, *FOLDERS, '--classes', CAMVID, *arguments)


@pytest.mark.slow
@pytest.mark.long
def test_a_segmentor_trains_tests_and_predicts_with_the_layout_of_camvid(tmp_path):
    short = ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'train_dataloader.batch_size=2']
    root, _ = camvid(tmp_path, '--ignore', '11', '--set', *short)
    trained = cli('train', 'mine.py', cwd=tmp_path)
    assert re.search(r'mIoU: [\d.]+', trained.stdout)
    checkpoint = tmp_path / 'work_dirs/mine/iter_2.pth'
    tested = cli('test', 'mine.py', checkpoint, '--show-dir', 'painted', cwd=tmp_path)
    assert re.search(r'mIoU: [\d.]+', tested.stdout)
    assert len(list((tmp_path / 'painted').rglob('*.png'))) == 4
    picture = root / 'val' / '0001TP_000001.png'
    cli('predict', 'mine.py', checkpoint, picture, '--out', tmp_path / 'predictions', cwd=tmp_path)
    with Image.open(tmp_path / 'predictions' / '0001TP_000001.labels.png') as labels:
        assert labels.size == (96, 72)
        assert np.array(labels).max() < 11


@pytest.mark.parametrize('root', ['as an option', 'in each path', 'both'])
def test_paths_are_relative_to_the_data_root_or_the_working_directory(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    make_camvid(tmp_path / 'CamVid')
    paths = FOLDERS
    if root != 'as an option':
        paths = [f'CamVid/{word}' if not word.startswith('--') else word for word in FOLDERS]
    option = [] if root == 'in each path' else ['--data-root', 'CamVid']
    config = write(tmp_path, *option, *paths, '--classes', CAMVID, '--ignore', '11')
    for split in ('train', 'val', 'test'):
        assert 11 not in mask_values(config, split)
        assert 255 in mask_values(config, split)
    check_data(config, ('train', 'val', 'test'))


def test_annotations_and_images_at_any_path(tmp_path):
    """Each split has one annotation file and one image folder, at any path."""
    root = make_coco(tmp_path / 'fruit', count=3)
    shutil.move(root / 'annotations/instances_train2017.json', root / 'train.json')
    shutil.move(root / 'annotations/instances_val2017.json', tmp_path / 'val.json')
    shutil.move(root / 'train2017', root / 'images')
    options = ['--train-ann', 'train.json', '--train-images', 'images', '--val-ann', tmp_path / 'val.json']
    config = write(tmp_path, '--data-root', root, *options, '--classes', ','.join(CLASSES), name=DETECTOR)
    assert config.val_evaluator.ann_file == config.test_evaluator.ann_file == str(tmp_path / 'val.json')
    init_default_scope('mmdet')
    for split in ('train', 'val', 'test'):
        dataset = DATASETS.build({**config[f'{split}_dataloader'].dataset, 'pipeline': []})
        assert len(dataset) == 3
        with Image.open(dataset.get_data_info(0)['img_path']) as image:
            assert image.size == (64, 64)


def test_a_list_of_names(tmp_path):
    """In the layout of Pascal VOC, a list of names selects the images of a split."""
    root = make_camvid(tmp_path / 'VOC')
    (root / 'some.txt').write_text('0001TP_000001\n0001TP_000003\n')
    paths = ['--train-ann', 'some.txt', *FOLDERS]
    config = write(tmp_path, '--data-root', root, *paths, '--classes', CAMVID, '--ignore', '11')
    init_default_scope('mmseg')
    assert len(DATASETS.build({**config.train_dataloader.dataset, 'pipeline': []})) == 2
    assert len(DATASETS.build({**config.val_dataloader.dataset, 'pipeline': []})) == 4


def test_suffixes_are_inferred_from_folders_given_by_set(tmp_path):
    root = make_camvid(tmp_path / 'CamVid', ending='_L')
    moved = [
        f'{split}_dataloader.dataset.data_prefix.{key}={folder}'
        for split, name in (('train', 'train'), ('val', 'val'), ('test', 'val'))
        for key, folder in (('img_path', name), ('seg_map_path', f'{name}annot'))
    ]
    config = write(tmp_path, '--data-root', root, '--classes', CAMVID, '--ignore', '11', '--set', *moved)
    for split in ('train', 'val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        assert (dataset.img_suffix, dataset.seg_map_suffix) == ('.png', '_L.png')


def test_explicit_suffixes_are_kept_and_skipped_images_are_reported(tmp_path, capsys):
    root = make_camvid(tmp_path / 'CamVid')
    (root / 'train/0001TP_000000.png').rename(root / 'train/0001TP_000000.JPG')
    arguments = ['--data-root', root, *FOLDERS, '--classes', CAMVID, '--ignore', '11']
    assert write(tmp_path, *arguments).train_dataloader.dataset.img_suffix == '.png'
    assert 'are read, not 1 .JPG' in capsys.readouterr().err
    kept = write(tmp_path, *arguments, '--set', 'train_dataloader.dataset.img_suffix=.JPG')
    assert kept.train_dataloader.dataset.img_suffix == '.JPG'


def test_ignored_values_are_in_every_pipeline_once_also_when_rewritten(tmp_path):
    name = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
    root = make_camvid(tmp_path / 'CamVid')
    arguments = ['--data-root', root, *FOLDERS, '--classes', CAMVID]
    first = write(tmp_path, *arguments, '--ignore', '11', name=name)
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    again = write(tmp_path, '--ignore', '11,12', name=str(tmp_path / 'first.py'))
    for config, expected in ((first, [11]), (again, [11, 12])):
        pipelines = [config[f'{split}_dataloader'].dataset.pipeline for split in ('train', 'val', 'test')]
        for pipeline in (*pipelines, config.test_pipeline, config.tta_pipeline):
            assert [step['values'] for step in pipeline if step['type'] == 'IgnoreMaskValues'] == [expected]


def test_settings_number_the_steps_of_the_recipe_whatever_masks_need(tmp_path):
    name = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
    root = make_camvid(tmp_path / 'CamVid')
    arguments = ['--data-root', root, *FOLDERS, '--classes', CAMVID, '--ignore', '11']
    values = ','.join(map(str, range(11)))
    settings = [f'{split}_dataloader.dataset.pipeline.1.scale=(640,400)' for split in ('val', 'test')]
    settings.append('train_dataloader.dataset.pipeline.2.scale=(320,200)')
    config = write(tmp_path, *arguments, '--mask-values', values, '--set', *settings, name=name)
    for split, size in (('train', (320, 200)), ('val', (640, 400)), ('test', (640, 400))):
        pipeline = config[f'{split}_dataloader'].dataset.pipeline
        (resize,) = [step for step in pipeline if 'Resize' in step.type]
        assert resize.scale == size
        kinds = [step.type for step in pipeline]
        loads = kinds.index('LoadAnnotations')
        assert kinds[loads - 2 : loads] == ['MapMaskValues', 'IgnoreMaskValues']
    # In the written config too, the steps of validation before the masks have the numbers of the recipe.
    assert [config.val_dataloader.dataset.pipeline[index].type for index in (0, 1)] == ['LoadImageFromFile', 'Resize']


def test_ignored_values_do_not_affect_samples_without_masks():
    step = TRANSFORMS.build({'type': 'IgnoreMaskValues', 'values': [11]})
    assert step({'img': 1, 'label_map': {3: 4}}) == {'img': 1, 'label_map': {3: 4, 11: 255}}


@pytest.mark.parametrize(
    ('name', 'arguments', 'message'),
    [
        (DETECTOR, ['--train-masks', 'x'], '--train-masks is for segmentation'),
        (DETECTOR, ['--ignore', '1'], '--ignore is for segmentation masks'),
        (SEGMENTOR, ['--ignore', '11'], 'name their classes with --classes'),
        (SEGMENTOR, ['--ignore', '3', '--classes', 'a,b,c,d'], 'the classes have the values 0, 1, 2, 3; got 3'),
        (SEGMENTOR, ['--ignore', 'x', '--classes', 'a,b'], '--ignore must be whole numbers'),
        (SEGMENTOR, ['--classes', 'a,b', '--train-images', '{masks}/empty'], r'empty, which contains no files'),
        (SEGMENTOR, ['--classes', 'a,b', '--train-images', '{masks}/text'], r'whose files end in \.txt \(2\)'),
        (
            SEGMENTOR,
            ['--classes', 'a,b', '--train-images', '{masks}/images/training', '--train-masks', '{masks}/strange'],
            r'no image in \S+ has a mask in \S+strange, whose files end in \.png \(1\): .*such as 0\.png and .*x\.png',
        ),
        (
            DETECTOR,
            ['--classes', 'apple,ripe pear', '--data-root', '{fruit}', '--train-images', 'val'],
            'of which 4 are missing',
        ),
        (
            DETECTOR,
            ['--data-root', '{fruit}', '--train-ann', 'x.json'],
            r'x\.json is no file of annotations in the format of COCO, because it has no images',
        ),
    ],
)
def test_invalid_options_are_one_error_and_write_nothing(tmp_path, capsys, name, arguments, message):
    masks, fruit = make_masks(tmp_path / 'roads'), make_coco(tmp_path / 'fruit')
    for folder, files in (('empty', ()), ('text', ('a.txt', 'b.txt')), ('strange', ('x.png',))):
        (masks / folder).mkdir()
        for file in files:
            (masks / folder / file).write_text('')
    (fruit / 'val').mkdir()
    (fruit / 'x.json').write_text('{}')
    words = [argument.format(masks=masks, fruit=fruit) for argument in arguments]
    assert main(['config', name, '--out', str(tmp_path / 'mine.py'), *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / 'mine.py').exists()


def value(root):
    for index, number in ((1, 13), (3, 12)):
        Image.new('L', (96, 72), number).save(root / f'trainannot/0001TP_00000{index}.png')
    return r'trainannot/0001TP_000001\.png has pixels of the value 13, but the classes are 0 to 10.*--ignore 12,13'


def size(root):
    with Image.open(root / 'trainannot/0001TP_000002.png') as mask:
        Image.fromarray(np.zeros_like(mask)[1:]).save(root / 'trainannot/0001TP_000002.png')
    return r'0001TP_000002\.png has \(96, 71\) pixels, its image \(96, 72\)'


def colours(root):
    Image.new('RGB', (96, 72)).save(root / 'trainannot/0001TP_000003.png')
    return r'0001TP_000003\.png is an array \(72, 96, 3\)'


def gone(root):
    (root / 'valannot/0001TP_000003.png').unlink()
    return r'1 of 4 files are missing: \S+valannot/0001TP_000003\.png .* whose files end in \.png \(3\)'


def endings(root):
    for path in (root / 'val').iterdir():
        path.rename(path.with_suffix('.jpeg'))
    return r'no images found in \S+val, whose files end in \.jpeg \(4\)'


def folder(root):
    shutil.rmtree(root / 'val')
    return r'there is no \S+/val; set the location of the data'


@pytest.mark.parametrize('damage', [value, size, colours, gone, endings, folder])
def test_invalid_data_is_one_error(tmp_path, damage):
    root, config = camvid(tmp_path, '--ignore', '11')
    check_data(config, ('train', 'val', 'test'))
    message = damage(root)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_data(config, ('train', 'val'))


def test_a_package_that_the_model_lacks_is_named_before_the_data(monkeypatch):
    monkeypatch.setattr('swin_dense.utils.packages.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=r'pip install transformers'):
        check_data(Config({'model': {'language_model': {'type': 'BertModel'}}}), ('train',))


def test_the_demo_masks_are_valid(demo_data):
    """The demo's masks have ADE20K's labels, and use six of the 150 classes."""
    config = load_recipe(SEGMENTOR)
    for split in ('train', 'val'):
        config[f'{split}_dataloader'].dataset.data_root = f'{demo_data}/ADEChallengeData2016'
    check_data(config, ('train', 'val'))
