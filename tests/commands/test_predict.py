"""`swin-dense predict` writes the predictions of the frameworks' own functions."""

import json
import os

import mmdet.apis
import mmseg.apis
import numpy as np
import pytest
import tifffile
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swin_dense.__main__ import main
from swin_dense.commands._images import images_at
from swin_dense.recipes.files import load_recipe
from swin_dense.workbench.predict import Predictor
from tests.conftest import randomize

RECIPES = {'mmdet': 'mask-rcnn_swin-demo_fpn', 'mmseg': 'upernet_swin-demo'}


def make_weights(framework, path, **meta):
    """Save random weights of a demo model, without class names unless ``meta`` has some, to a file."""
    init_default_scope(framework)
    model = MODELS.build(load_recipe(RECIPES[framework]).model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': meta}, path)


@pytest.fixture
def pictures(tmp_path):
    generator = np.random.default_rng(0)
    folder = tmp_path / 'my pictures'
    folder.mkdir()
    paths = [folder / 'a b.png', folder / 'c.jpg']
    for path in paths:
        Image.fromarray(generator.integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(path)
    return paths


def predict(framework, tmp_path, *images, options=()):
    weights = tmp_path / 'weights.pth'
    make_weights(framework, weights)
    out = tmp_path / 'out'
    status = main(['predict', RECIPES[framework], str(weights), *map(str, images), '--out', str(out), *options])
    return status, out, str(weights)


def names_in(out):
    """Return the paths of the results in a folder, without the record of the options."""
    return sorted(path.relative_to(out).as_posix() for path in out.rglob('[!.]*') if path.is_file())


def test_a_detector(tmp_path, pictures):
    status, out, weights = predict('mmdet', tmp_path, *pictures, options=('--score', '0'))
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == [
        '.predict.json',
        'a b.json',
        'a b.painted.jpg',
        'c.json',
        'c.painted.jpg',
    ]
    config = load_recipe(RECIPES['mmdet'])
    for path in pictures:
        model = mmdet.apis.init_detector(config, weights, device='cpu')
        expected = mmdet.apis.inference_detector(model, str(path)).pred_instances
        record = json.loads((out / f'{path.stem}.json').read_text())
        found = record['instances']
        assert len(found) == len(expected) > 0
        assert {key: record[key] for key in record if key != 'instances'} == {
            'format': 1,
            'image': str(path),
            'height': 60,
            'width': 90,
        }
        torch.testing.assert_close(torch.tensor([one['box'] for one in found]), expected.bboxes)
        torch.testing.assert_close(torch.tensor([one['score'] for one in found]), expected.scores)
        assert [one['label'] for one in found] == expected.labels.tolist()
        assert {one['class'] for one in found} <= {'disc', 'ring', 'square', 'triangle', 'star'}
        masks = [coco_mask.decode(one['mask']).astype(bool) for one in found]
        np.testing.assert_array_equal(masks, expected.masks.numpy())
        with Image.open(out / f'{path.stem}.painted.jpg') as painted:
            assert painted.size == (90, 60)


def test_instances_below_the_score_are_left_out(tmp_path, pictures):
    status, out, _ = predict('mmdet', tmp_path, pictures[0], options=('--score', '0.9999'))
    assert status == 0
    assert json.loads((out / 'a b.json').read_text())['instances'] == []


def test_a_segmentor_and_a_file_that_is_no_image(tmp_path, pictures, capsys):
    (tmp_path / 'broken.jpg').write_text('no picture')
    status, out, weights = predict('mmseg', tmp_path, tmp_path / 'broken.jpg', pictures[1])
    assert status == 1
    assert "broken.jpg': the content is not an image" in capsys.readouterr().err
    assert names_in(out) == ['c.json', 'c.labels.png', 'c.painted.jpg']
    model = mmseg.apis.init_model(load_recipe(RECIPES['mmseg']), weights, device='cpu')
    expected = mmseg.apis.inference_model(model, str(pictures[1])).pred_sem_seg.data[0].numpy()
    np.testing.assert_array_equal(np.array(Image.open(out / 'c.labels.png')), expected)
    segments = json.loads((out / 'c.json').read_text())['segments']
    assert sum(segment['share'] for segment in segments) == pytest.approx(1)
    names = ('wall', 'ball', 'clock', 'box', 'flag', 'light')
    for segment in segments:
        assert segment['class'] == names[segment['label']]
        assert segment['share'] == pytest.approx((expected == segment['label']).mean())


FIVE, SIX = ('a', 'b', 'c', 'd', 'e'), ('u', 'v', 'w', 'x', 'y', 'z')
COLOURS = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14, 15)]


@pytest.mark.parametrize(
    ('framework', 'meta', 'dataset', 'classes', 'palette'),
    [
        # Names of the checkpoint, also if the test data set is COCO with its 80 names.
        ('mmdet', {'dataset_meta': {'classes': FIVE, 'palette': COLOURS}}, {'metainfo': {}}, FIVE, COLOURS),
        ('mmdet', {'CLASSES': FIVE, 'PALETTE': COLOURS}, {'metainfo': {}}, FIVE, COLOURS),
        ('mmdet', {'dataset_meta': {'CLASSES': FIVE}}, {}, FIVE, None),
        ('mmseg', {'dataset_meta': {'classes': SIX, 'palette': COLOURS}}, {'type': 'ADE20KDataset'}, SIX, None),
        # Names of the test data set.
        ('mmdet', {}, {'metainfo': {'classes': FIVE, 'palette': COLOURS}}, FIVE, COLOURS),
        ('mmdet', {}, {'metainfo': {'classes': '{file}'}}, FIVE, None),
        ('mmseg', {'epoch': 3}, {'metainfo': {'classes': SIX}}, SIX, None),
    ],
)
def test_class_names_come_from_the_checkpoint_or_the_data_set(tmp_path, framework, meta, dataset, classes, palette):
    names = tmp_path / 'names.txt'
    names.write_text('\n'.join(FIVE))
    config = load_recipe(RECIPES[framework])
    for key, value in dataset.items():
        config.test_dataloader.dataset[key] = value
    if config.test_dataloader.dataset.get('metainfo', {}).get('classes') == '{file}':
        config.test_dataloader.dataset.metainfo = {'classes': str(names)}
    make_weights(framework, tmp_path / 'w.pth', **meta)
    predictor = Predictor(config, str(tmp_path / 'w.pth'), 'cpu')
    assert predictor.classes == classes
    assert predictor.model.dataset_meta == {'classes': classes, 'palette': predictor.palette}
    assert predictor.palette == palette or palette is None
    assert len(set(predictor.palette)) == len(classes)


@pytest.mark.parametrize(
    ('framework', 'meta', 'dataset', 'message'),
    [
        ('mmdet', {}, {'metainfo': {}}, 'predicts 5 .* 0 class names .* set 80'),
        ('mmdet', {'CLASSES': SIX}, {}, 'predicts 5 .* 6 class names and .* set 5'),
        ('mmseg', {}, {'type': 'BaseSegDataset', 'metainfo': {}}, 'predicts 6 .* 0 class names and .* set 0'),
    ],
)
def test_class_names_must_be_as_many_as_the_head_has(tmp_path, framework, meta, dataset, message):
    config = load_recipe(RECIPES[framework])
    for key, value in dataset.items():
        config.test_dataloader.dataset[key] = value
    make_weights(framework, tmp_path / 'w.pth', **meta)
    with pytest.raises(ValueError, match=message):
        Predictor(config, str(tmp_path / 'w.pth'), 'cpu')


def test_a_config_without_a_framework_is_refused():
    with pytest.raises(ValueError, match=r"default_scope = .* or 'mmseg', got None"):
        Predictor(Config({'model': {}}), 'a.pth', 'cpu')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['{a}', '{a}', 'nowhere.jpg'], 'there is no file nowhere.jpg'),
        (['{a}', 'nowhere.pth', '{a}'], 'there is no file nowhere.pth'),
        (['no-such-recipe', '{a}', '{a}'], 'no recipe and no config file'),
        (['upernet_swin-demo', '{a}', '{a}', '--score', '2'], '--score must lie between 0 and 1'),
        (['upernet_swin-demo', '{a}', '{a}'], 'is not a checkpoint of it (UnpicklingError'),
        (['upernet_swin-demo', '{a}', '{a}', '{a}'], 'several images have the name a b'),
        (['model.onnx', '{a}', '--overlap', '8'], '--overlap needs --tile'),
        (['model.onnx', '{a}', '--tile', '0'], '--tile must be at least 1'),
        (['model.onnx', '{a}', '--annotations', 'a.json'], '--annotations needs --format coco'),
        (['model.onnx', '{a}', '--resume', '--force'], '--resume keeps results and --force replaces them'),
    ],
)
def test_wrong_arguments(tmp_path, pictures, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(['predict', *(argument.format(a=pictures[0]) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'predictions').exists()


FRUIT = ['disc', 'ring', 'square', 'triangle', 'star']


@pytest.mark.parametrize('framework', ['mmdet', 'mmseg'])
def test_an_image_within_one_tile_is_predicted_as_a_whole(tmp_path, pictures, framework):
    _, whole, weights = predict(framework, tmp_path, pictures[0], options=('--score', '0.2'))
    arguments = [RECIPES[framework], weights, str(pictures[0]), '--out', str(tmp_path / 'tiles'), '--score', '0.2']
    assert main(['predict', *arguments, '--tile', '448']) == 0
    ours, expected = (json.loads((folder / 'a b.json').read_text()) for folder in (tmp_path / 'tiles', whole))
    if framework == 'mmseg':
        assert ours == expected
        labels = tifffile.imread(tmp_path / 'tiles' / 'a b.labels.tif')
        np.testing.assert_array_equal(labels, np.array(Image.open(whole / 'a b.labels.png')))
    else:
        assert len(ours['instances']) == len(expected['instances']) > 0
        for one, other in zip(ours['instances'], expected['instances'], strict=True):
            assert one['box'] == pytest.approx(other['box'], abs=1e-3)
            assert {**one, 'box': None, 'score': None} == {**other, 'box': None, 'score': None}
    assert not list((tmp_path / 'tiles').glob('*painted*'))


def test_a_folder_stands_for_the_images_in_it(tmp_path):
    """Those with a suffix that `swin-dense features` knows too, but no folders of Zarr."""
    (tmp_path / 'b').mkdir()
    (tmp_path / 'd.zarr').mkdir()
    for name in ('b/c.JP2', 'a.png', 'notes.md'):
        (tmp_path / name).write_bytes(b'')
    images, unread = images_at([str(tmp_path)])
    assert images == [(str(tmp_path / name), name) for name in ('a.png', 'b/c.JP2')]
    assert unread == []


def write_images_in_subfolders(root):
    """Write images of the same names into two folders, and return their paths below ``root``."""
    random = np.random.default_rng(3)
    names = [f'{folder}/{number}.png' for folder in ('cam 1', 'cam 2') for number in range(2)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(root / name)
    return names


@pytest.fixture
def evaluated(tmp_path):
    """A config whose test data are images in subfolders, annotated with every second object that its model finds.

    Returns the config, the weights, the images, and the annotations.
    """
    names = write_images_in_subfolders(tmp_path / 'images')
    config = load_recipe(RECIPES['mmdet'])
    make_weights('mmdet', tmp_path / 'weights.pth')
    model = mmdet.apis.init_detector(config, str(tmp_path / 'weights.pth'), device='cpu')
    images, annotations = [], []
    for number, name in enumerate(names):
        images.append({'id': 70 - number, 'file_name': name, 'height': 60, 'width': 90})
        found = mmdet.apis.inference_detector(model, str(tmp_path / 'images' / name)).pred_instances
        for box, label, mask in list(zip(found.bboxes, found.labels, found.masks.numpy(), strict=True))[
            number % 2 :: 3
        ]:
            x, y, right, bottom = box.tolist()
            run_lengths = coco_mask.encode(np.asfortranarray(mask))
            annotations.append(
                {
                    'id': len(annotations) + 1,
                    'image_id': 70 - number,
                    'category_id': 9 - int(label),
                    'bbox': [x, y, right - x, bottom - y],
                    'area': float(mask.sum()),
                    'segmentation': {**run_lengths, 'counts': run_lengths['counts'].decode()},
                    'iscrowd': 0,
                }
            )
    categories = [{'id': 9 - label, 'name': name} for label, name in enumerate(FRUIT)]
    truth = {'images': images, 'annotations': annotations, 'categories': categories}
    (tmp_path / 'truth.json').write_text(json.dumps(truth))
    config.test_dataloader.dataset.update(
        data_root=str(tmp_path),
        ann_file='truth.json',
        data_prefix={'img': 'images/'},
        metainfo={'classes': tuple(FRUIT)},
    )
    config.test_evaluator.update(ann_file=str(tmp_path / 'truth.json'), metric=['bbox', 'segm'])
    config.load_from, config.work_dir = str(tmp_path / 'weights.pth'), str(tmp_path / 'work')
    config.dump(tmp_path / 'config.py')
    return config, tmp_path


def average_precision(truth, results, kind):
    data = COCO(str(truth))
    evaluation = COCOeval(data, data.loadRes(str(results)), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[0]


def test_results_in_subfolders_have_the_average_precision_of_the_framework(evaluated):
    config, folder = evaluated
    expected = Runner.from_cfg(config).test()
    model = [str(folder / 'config.py'), str(folder / 'weights.pth')]
    options = ['--format', 'coco', '--annotations', str(folder / 'truth.json'), '--out', str(folder / 'out')]
    assert main(['predict', *model, str(folder / 'images'), *options]) == 0
    for kind in ('bbox', 'segm'):
        ours = average_precision(folder / 'truth.json', folder / 'out' / 'coco_results.json', kind)
        assert ours == pytest.approx(expected[f'coco/{kind}_mAP'], abs=6e-4)  # which mmdet rounds to three places
        assert ours > 0.05
    written = json.loads((folder / 'out' / 'coco_annotations.json').read_text())
    truth = json.loads((folder / 'truth.json').read_text())
    assert written['images'] == truth['images']
    assert 'cam 2/1.painted.jpg' in names_in(folder / 'out')


def test_annotations_of_other_images(evaluated, capsys):
    _, folder = evaluated
    model = [str(folder / 'config.py'), str(folder / 'weights.pth')]
    truth = json.loads((folder / 'truth.json').read_text())

    def predict_with(known, *images):
        (folder / 'known.json').write_text(json.dumps(known))
        options = ['--format', 'coco', '--annotations', str(folder / 'known.json'), '--out', str(folder / 'out')]
        return main(['predict', *model, *images, *options, '--force']), capsys.readouterr().err

    status, printed = predict_with([1, 2], str(folder / 'images'))
    assert status == 2
    assert "the annotations are not in COCO's format: they must have images" in printed
    flat = [{**image, 'file_name': image['file_name'].rpartition('/')[2]} for image in truth['images'][:2]]
    status, printed = predict_with({**truth, 'images': flat}, str(folder / 'images'))
    assert status == 2
    assert 'are both 0.png, so one would replace the other' in printed
    status, printed = predict_with({**truth, 'images': truth['images'][1:]}, str(folder / 'images'))
    assert status == 1
    assert printed.count('\n') == 1
    assert 'the annotations have no image cam 1/0.png, so it is left out' in printed
    status, printed = predict_with({**truth, 'images': flat}, str(folder / 'images' / 'cam 1'))
    assert status == 0
    other = [{'id': 1, 'file_name': 'x.jpg'}]
    status, printed = predict_with({**truth, 'images': other}, str(folder / 'images'))
    assert status == 2
    assert 'the annotations have no image cam 1/0.png, nor any other' in printed


@pytest.mark.parametrize('tile', [[], ['--tile', '64']], ids=['whole', 'tiles'])
@pytest.mark.parametrize(
    ('load', 'dtype'),
    [
        ({'color_type': 'unchanged'}, np.uint16),
        ({'imdecode_backend': 'tifffile'}, np.float32),
        ({'color_type': 'unchanged', 'imdecode_backend': 'pillow'}, np.uint8),
        ({'to_float32': True, 'color_type': 'color'}, np.uint8),
    ],
)
def test_images_are_read_with_the_options_of_the_loader(tmp_path, load, dtype, tile):
    """A model of one channel sees the stored values, which in colours of 8 bits would be other ones."""
    is_grey = load.get('color_type') != 'color'
    config = load_recipe(RECIPES['mmseg'])
    if is_grey:
        config.model.backbone.in_channels = 1
        config.model.data_preprocessor.update(
            mean=[0.0], std=[3000.0 if dtype == np.uint16 else 50.0], bgr_to_rgb=False
        )
    config.test_dataloader.dataset.pipeline = [
        {'type': 'LoadImageFromFile', **load},
        {'type': 'PackSegInputs'},
    ]
    config.test_pipeline = config.test_dataloader.dataset.pipeline  # which mmseg's own function reads
    init_default_scope('mmseg')
    model = randomize(MODELS.build(config.model))
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'weights.pth')
    config.dump(tmp_path / 'config.py')
    random = np.random.default_rng(0)
    pixels = random.integers(0, 16000 if dtype == np.uint16 else 255, (64, 64) if is_grey else (64, 64, 3)).astype(
        dtype
    )
    picture = tmp_path / f'picture.{"tif" if dtype == np.float32 else "png"}'
    if dtype == np.float32:
        tifffile.imwrite(picture, pixels)
    else:
        Image.fromarray(pixels).save(picture)
    given = ['predict', str(tmp_path / 'config.py'), str(tmp_path / 'weights.pth'), str(picture)]
    assert main([*given, '--out', str(tmp_path / 'out'), *tile]) == 0
    reference = mmseg.apis.init_model(config, str(tmp_path / 'weights.pth'), device='cpu')
    expected = mmseg.apis.inference_model(reference, str(picture)).pred_sem_seg.data[0].numpy()
    assert len(np.unique(expected)) > 1
    ours = (
        tifffile.imread(tmp_path / 'out/picture.labels.tif')
        if tile
        else Image.open(tmp_path / 'out/picture.labels.png')
    )
    np.testing.assert_array_equal(np.asarray(ours), expected)


def test_the_pipeline_must_begin_with_a_loader(tmp_path):
    config = load_recipe(RECIPES['mmseg'])
    config.test_dataloader.dataset.pipeline = config.test_dataloader.dataset.pipeline[-1:]
    with pytest.raises(ValueError, match="load the image, got 'PackSegInputs'"):
        Predictor(config, 'weights.pth', 'cpu')


def test_nothing_is_written_outside_of_the_output(tmp_path, monkeypatch):
    """Configs of `test --show-dir` and `train` name a folder of their own for pictures."""
    folder = tmp_path / 'photos'
    folder.mkdir()
    name = os.fsdecode(b'\xff.png')  # not UTF-8
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(folder / name)
    config = load_recipe(RECIPES['mmseg'])
    shown = tmp_path / 'shown'
    config.visualizer.update(vis_backends=[{'type': 'LocalVisBackend'}], save_dir=str(shown))
    config.dump(tmp_path / 'config.py')
    make_weights('mmseg', tmp_path / 'weights.pth')
    monkeypatch.chdir(tmp_path)
    assert main(['predict', 'config.py', 'weights.pth', str(folder), '--out', 'out']) == 0
    assert (tmp_path / 'out' / os.fsdecode(b'\xff.labels.png')).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ['config.py', 'out', 'photos', 'weights.pth']
