"""Custom data sets: options set their paths, and defects of the data are one error before training."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from swin_dense.workbench.checking.stated import read_source
from swin_dense.workbench.configs.experiment import DataSet, Experiment
from tests.conftest import ROOT
from tests.workbench.configs.data import (
    CLASSES,
    SEGMENTOR,
    SPLITS,
    TRAIN,
    VAL,
    OwnData,
    check_data,
    dataset_of,
    make_camvid,
    mask_values,
    written,
)

CAMVID = 'Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist'
FOLDERS = ['--train-images', 'train', '--train-masks', 'trainannot', '--val-images', 'val', '--val-masks', 'valannot']
MASK_RCNN = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'


def test_masks_of_cvat_become_masks_of_indices(tmp_path, capsys, monkeypatch):
    """The block of the page that converts them."""
    for folder in ('SegmentationClass', 'images'):
        (tmp_path / folder).mkdir()
    (tmp_path / 'labelmap.txt').write_text(
        '# label:color_rgb:parts:actions\nbackground:0,0,0::\nroad:128,64,128::\ncar:0,0,142::\n'
    )
    colours = np.array([(0, 0, 0), (128, 64, 128), (0, 0, 142), (9, 9, 9)], np.uint8)
    labels = np.arange(64).reshape(8, 8) % 4
    for number in range(4):
        Image.fromarray(colours[labels]).save(tmp_path / 'SegmentationClass' / f'{number}.png')
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / 'images' / f'{number}.jpg')
    monkeypatch.chdir(tmp_path)
    page = (ROOT / 'docs' / 'own-data.md').read_text()
    (block,) = re.findall(r'^```py\n(# needs labelmap.*?)^```', page, re.S | re.M)
    exec(block, {})
    names = capsys.readouterr().out.strip()
    assert names == 'background,road,car'
    np.testing.assert_array_equal(np.asarray(Image.open('masks/3.png')), np.where(labels == 3, 255, labels))
    written(tmp_path, '--data-root', tmp_path, '--val-share', '0.3', '--classes', names, name=SEGMENTOR)


@pytest.fixture
def camvid(tmp_path, capsys):
    return OwnData(make_camvid(tmp_path / 'CamVid'), SEGMENTOR, capsys, *FOLDERS, '--classes', CAMVID, '--ignore', '11')


@pytest.mark.parametrize('option', [['--data-root', 'CamVid'], []])
def test_paths_are_relative_to_the_data_root_or_the_working_directory(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    make_camvid(tmp_path / 'CamVid')
    paths = [word if word.startswith('--') else f'CamVid/{word}' for word in FOLDERS]
    config = written(
        tmp_path,
        *option,
        *paths,
        '--classes',
        CAMVID,
        '--ignore',
        '11',
        name=SEGMENTOR,
    )
    for split in SPLITS:
        assert 11 not in mask_values(config, split)
        assert 255 in mask_values(config, split)
    check_data(config, SPLITS)


def test_annotations_and_images_at_any_path(fruit, tmp_path):
    """Each split has one annotation file and one image folder, at any path."""
    (fruit.root / TRAIN).rename(fruit.root / 'train.json')
    (fruit.root / VAL).rename(tmp_path / 'val.json')
    (fruit.root / 'train2017').rename(fruit.root / 'images')
    paths = ['--train-ann', 'train.json', '--train-images', 'images', '--val-ann', tmp_path / 'val.json']
    config = fruit.write(*paths)
    assert config.val_evaluator.ann_file == config.test_evaluator.ann_file == str(tmp_path / 'val.json')
    for split in SPLITS:
        dataset = dataset_of(config, split, pipeline=[])
        assert len(dataset) == 4
        Image.open(dataset.get_data_info(0)['img_path']).load()


def test_annotations_stay_below_the_data_root_of_the_recipe(fruit, monkeypatch):
    """Without --data-root, only the given paths are relative to the working directory."""
    monkeypatch.chdir(fruit.beside)
    monkeypatch.setenv('COCO_ROOT', str(fruit.root))
    fruit.words = ['--classes', ','.join(CLASSES)]
    config = fruit.write('--train-images', 'fruit/train2017', '--val-images', 'fruit/val2017', name=MASK_RCNN)
    assert [len(dataset_of(config, split)) for split in SPLITS] == [4, 4, 4]


def test_lists_of_names_and_suffixes_choose_the_images(camvid, capsys):
    """In the layout of Pascal VOC, a list of names selects the images of a split."""
    (camvid.root / 'some.txt').write_text('0001TP_000001\n0001TP_000003\n')
    config = camvid.write('--train-ann', 'some.txt')
    assert [len(dataset_of(config, split)) for split in SPLITS] == [2, 4, 4]
    (camvid.root / 'train/0001TP_000000.png').rename(camvid.root / 'train/0001TP_000000.JPG')
    assert camvid.write().train_dataloader.dataset.img_suffix == '.png'
    assert 'are read, not 1 .JPG' in capsys.readouterr().err
    kept = camvid.write('--set', 'train_dataloader.dataset.img_suffix=.JPG')
    assert kept.train_dataloader.dataset.img_suffix == '.JPG'


def run_command_in(said):
    """Run the command at the end of an error."""
    command = said.strip().rpartition('rename the others: ')[2]
    subprocess.run(['sh', '-c', command], check=True)


def test_endings_that_differ_in_case_are_an_error_with_the_command_that_renames(camvid):
    """mmseg reads the files of one ending, so that the others would be left out; a folder is no image."""
    (camvid.root / 'train/empty.PNG').mkdir()
    for folder in ('train', 'trainannot'):
        (camvid.root / folder / 'more').mkdir()
        name = '0001TP_000000'
        (camvid.root / folder / f'{name}.png').rename(camvid.root / folder / f'more/{name}.png')
    assert len(dataset_of(camvid.write(), 'train')) == 4
    for folder, kind in (('train', 'images'), ('trainannot', 'masks')):
        path = camvid.root / folder / 'more/0001TP_000000.png'
        path.rename(path.with_suffix('.PNG'))
        said = camvid.refused()
        assert f'in {camvid.root / folder}, 3 {kind} end in .png and 1 in .PNG, but mmseg reads one ending' in said
        run_command_in(said)
        assert len(dataset_of(camvid.write(), 'train')) == 4


def test_endings_that_differ_in_case_in_data_to_split(roads):
    for kind in ('images', 'annotations'):
        shutil.rmtree(roads.root / kind / 'validation')
        (roads.root / kind / 'training').rename(roads.root / 'moved')
        (roads.root / kind).rmdir()
        (roads.root / 'moved').rename(roads.root / {'images': 'images', 'annotations': 'masks'}[kind])
    (roads.root / 'images/0.png').rename(roads.root / 'images/0.Png')
    said = roads.refused('--val-share', '0.5')
    assert '3 images end in .png and 1 in .Png' in said
    run_command_in(said)
    roads.write('--val-share', '0.5')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--data-root', 'nowhere'], "there is no folder 'nowhere' (--data-root)"),
        (['--train-ann', 'annotations/x.json'], "there is no 'annotations/x.json' (--train-ann), neither in "),
        (['--val-images', 'val2018'], "there is no 'val2018' (--val-images), neither in "),
        (['--classes', 'names.txt'], '--classes names.txt: there is no such file'),
        (['--classes', 'x.json'], '--classes x.json: there is no such file'),
    ],
)
def test_a_given_file_or_folder_that_does_not_exist_is_an_error(fruit, words, message):
    said = fruit.refused(*words)
    assert message in said
    if 'neither' in message:
        assert 'it has annotations/, train2017/, val2017/, whose files end in .jpg (8), .json (2)' in said
    assert not (fruit.beside / 'mine.py').exists()


def test_a_given_file_that_does_not_exist_without_a_data_root_is_an_error(fruit, monkeypatch):
    monkeypatch.chdir(fruit.beside)
    fruit.words = ['--classes', ','.join(CLASSES)]
    assert "there is no 'x.json' (--val-ann) in the current folder" in fruit.refused('--val-ann', 'x.json')


@pytest.mark.parametrize(
    'layout',
    [
        ('img_dir/train', 'ann_dir/train', 'img_dir/val', 'ann_dir/val'),
        ('Images/Train', 'Masks/Train', 'Images/Test', 'Masks/Test'),
        ('train/images', 'train/masks', 'valid/images', 'valid/masks'),
    ],
)
def test_folders_of_both_parts_of_segmentation_are_found(roads, layout):
    recipe = ('images/training', 'annotations/training', 'images/validation', 'annotations/validation')
    for old, new in zip(recipe, layout, strict=True):
        (roads.root / new).parent.mkdir(exist_ok=True)
        (roads.root / old).rename(roads.root / new)
    for name in ('images', 'annotations'):
        (roads.root / name).rmdir()
    config = roads.write()
    for split in SPLITS:
        dataset = dataset_of(config, split)
        part = layout[:2] if split == 'train' else layout[2:]
        assert [*dataset.data_prefix.values()] == [str(roads.root / folder) for folder in part]
        assert len(dataset) == 4
    said = roads.refused('--val-share', '0.5')
    assert '--val-share splits training data; give them, without validation data' in said


def test_a_part_without_masks_is_left_out(roads):
    """Both folders of a part are needed: images of a test without masks are no validation data."""
    (roads.root / 'annotations/validation').rename(roads.root / 'elsewhere')
    (roads.root / 'images/training').rename(roads.root / 'images/train')
    (roads.root / 'annotations/training').rename(roads.root / 'annotations/train')
    said = roads.refused()
    assert 'has no validation data beside images/train, annotations/train; give --val-share 0.2' in said
    roads.write('--val-share', '0.5')


def test_half_of_a_layout_is_an_error(fruit):
    """The training data are where the recipe expects them, the validation data elsewhere."""
    (fruit.root / VAL).rename(fruit.root / 'annotations/val.json')
    said = fruit.refused()
    assert (
        f'there is no {fruit.root / VAL}, as the recipe expects, and no options such as --val-ann name others' in said
    )
    fruit.write('--val-ann', 'annotations/val.json')


def test_suffixes_are_inferred_from_folders_given_by_set(tmp_path):
    root = make_camvid(tmp_path / 'CamVid', ending='_L')
    moved = []
    for split, name in (('train', 'train'), ('val', 'val'), ('test', 'val')):
        prefix = f'{split}_dataloader.dataset.data_prefix'
        moved += [f'{prefix}.img_path={name}', f'{prefix}.seg_map_path={name}annot']
    words = ['--data-root', root, '--classes', CAMVID, '--ignore', '11', '--set', *moved]
    config = written(tmp_path, *words, name=SEGMENTOR)
    for split in SPLITS:
        dataset = config[f'{split}_dataloader'].dataset
        assert (dataset.img_suffix, dataset.seg_map_suffix) == ('.png', '_L.png')


def ignored(config):
    pipelines = [config[f'{split}_dataloader'].dataset.pipeline for split in SPLITS]
    pipelines += [config.test_pipeline, config.tta_pipeline]
    return [[step['values'] for step in steps if step['type'] == 'IgnoreMaskValues'] for steps in pipelines]


def test_ignored_values_are_in_every_pipeline_once_also_when_rewritten(camvid, tmp_path):
    assert ignored(camvid.write(name=UPERNET)) == [[[11]]] * 5
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    again = written(tmp_path, '--ignore', '11,12', name=tmp_path / 'first.py')
    assert ignored(again) == [[[11, 12]]] * 5


def test_settings_number_the_steps_of_the_recipe_whatever_masks_need(camvid):
    """The transforms for masks come after the steps that a user numbers, such as the resizing."""
    sizes = {
        'train': ('2', (320, 200)),
        'val': ('1', (640, 400)),
        'test': ('1', (640, 400)),
    }
    settings = [f'{split}_dataloader.dataset.pipeline.{at}.scale={size}' for split, (at, size) in sizes.items()]
    values = ','.join(map(str, range(11)))
    config = camvid.write('--mask-values', values, '--set', *settings, name=UPERNET)
    for split, (_, size) in sizes.items():
        pipeline = config[f'{split}_dataloader'].dataset.pipeline
        (resize,) = [step for step in pipeline if 'Resize' in step.type]
        assert resize.scale == size
        kinds = ' '.join(step.type for step in pipeline)
        assert 'MapMaskValues IgnoreMaskValues LoadAnnotations' in kinds
    # In the written config too, the steps of validation before the masks have the numbers of the recipe.
    first, second, *_ = config.val_dataloader.dataset.pipeline
    assert (first.type, second.type) == ('LoadImageFromFile', 'Resize')


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('--ignore 11', 'name their classes with --classes'),
        ('--ignore 3 --classes a,b,c,d', 'the classes have the values 0, 1, 2, 3; got 3'),
        ('--ignore x --classes a,b', '--ignore must be whole numbers'),
        ('--classes a,b --train-images {}/empty', r'empty, which contains no files'),
        ('--classes a,b --train-images {}/text', r'whose files end in \.txt \(2\)'),
        (
            '--classes a,b --train-images {0}/images/training --train-masks {0}/strange',
            r'no image in \S+ has a mask in \S+strange, whose files end in \.png \(1\): .*such as 0\.png and .*x\.png',
        ),
    ],
)
def test_invalid_options_for_masks_are_one_error(roads, words, message):
    for name in ('empty/', 'text/a.txt', 'text/b.txt', 'strange/x.png'):
        folder, _, file = name.partition('/')
        (roads.root / folder).mkdir(exist_ok=True)
        if file:
            (roads.root / name).write_text('')
    roads.words = words.format(roads.root).split()
    assert re.search(message, roads.refused())
    assert not (roads.beside / 'mine.py').exists()


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--train-masks', 'x'], '--train-masks is for segmentation'),
        (['--ignore', '1'], '--ignore is for segmentation masks'),
        (['--train-images', 'val'], '4 of them missing'),
        (
            ['--train-ann', 'x.json'],
            r'x\.json is no file of annotations in the format of COCO, because it has no images',
        ),
    ],
)
def test_invalid_options_for_boxes_are_one_error(fruit, words, message):
    (fruit.root / 'val').mkdir()
    (fruit.root / 'x.json').write_text('{}')
    assert re.search(message, fruit.refused(*words))
    assert not (fruit.beside / 'mine.py').exists()


def value(root):
    for index, number in ((1, 13), (3, 12)):
        Image.new('L', (96, 72), number).save(root / f'trainannot/0001TP_00000{index}.png')


def size(root):
    Image.new('L', (96, 71)).save(root / 'trainannot/0001TP_000002.png')


def colours(root):
    Image.new('RGB', (96, 72)).save(root / 'trainannot/0001TP_000003.png')


def gone(root):
    (root / 'valannot/0001TP_000003.png').unlink()


def endings(root):
    for path in (root / 'val').iterdir():
        path.rename(path.with_suffix('.jpeg'))


def folder(root):
    shutil.rmtree(root / 'val')


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (
            value,
            r'trainannot/0001TP_000001\.png has pixels of the value 13, but the classes are 0 to 10.*--ignore 12,13',
        ),
        (size, r'0001TP_000002\.png has 96 x 71 pixels, but its image \S+train/0001TP_000002\.png is read as 96 x 72'),
        (colours, r'0001TP_000003\.png is an array \(72, 96, 3\)'),
        (gone, r'1 of 4 files are missing: \S+valannot/0001TP_000003\.png .* whose files end in \.png \(3\)'),
        (endings, r'no images found in \S+val, whose files end in \.jpeg \(4\)'),
        (folder, r'there is no \S+/val; set the location of the data'),
    ],
)
def test_invalid_data_is_one_error(camvid, damage, message):
    config = camvid.write()
    check_data(config, SPLITS)
    damage(camvid.root)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_data(config, ('train', 'val'))


def test_a_package_that_the_model_lacks_is_named_before_the_data(monkeypatch):
    monkeypatch.setattr('swin_dense.utils.packages.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=r'pip install transformers'):
        check_data(Config({'model': {'language_model': {'type': 'BertModel'}}}), ('train',))


def test_a_path_that_is_no_text_and_a_data_set_without_a_type_are_one_error():
    dataset = {'type': 'ADE20KDataset', 'data_root': 'data/', 'data_prefix': {'img_path': 3}}
    config = Config({'model': {}, 'val_dataloader': {'dataset': dataset}})
    with pytest.raises(ValueError, match=r'data_prefix.img_path of val_dataloader.dataset must be a str, got 3'):
        Experiment(config)
    for scope in ('mmdet', 'mmseg'):
        data = DataSet(Experiment(Config({'default_scope': scope, 'model': {}})), {'data_root': 'data/'}, 'train')
        with pytest.raises(
            ValueError, match=r'a data set cannot be built \(KeyError: .* the key "type", but got .*data/'
        ):
            read_source(data)


def test_classes_that_are_not_there_and_a_step_that_reads_files(camvid):
    config = camvid.write()
    step = {'type': 'Paste', 'data_root': 'pasted/'}
    config.train_dataloader.dataset.pipeline.insert(1, step)
    assert [data.split for data in Experiment(config).datasets] == list(SPLITS)
    for name in ('Paste', 'Unheard'):
        message = rf'train_dataloader\.dataset cannot be built \(KeyError: .{name} is not in the mmseg::'
        with pytest.raises(ValueError, match=message):
            check_data(config, ('train',))
        config.train_dataloader.dataset.type = 'Unheard'


def test_data_that_are_in_no_layout_are_an_error_without_test_data_too(tmp_path, capsys):
    (tmp_path / 'fruit').mkdir()
    parts = ('test_dataloader', 'test_evaluator', 'test_cfg')
    written(tmp_path, '--set', *(f'{part}=None' for part in parts))
    (tmp_path / 'mine.py').rename(tmp_path / 'first.py')
    written(tmp_path, '--data-root', tmp_path / 'fruit', name=tmp_path / 'first.py', status=2)
    assert 'as the recipe expects, and no other layout was found' in capsys.readouterr().err
