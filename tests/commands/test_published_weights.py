"""`swin-dense predict RECIPE photo.jpg` fetches the published weights of the recipe, here from a local server."""

import json
import re
import shutil
import threading

import pytest
import torch
from mmdet.datasets import CocoDataset
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

from swin_dense.commands import _mm
from swin_dense.commands._main import main
from swin_dense.workbench.configs.settings import merge_settings
from swin_dense.workbench.recipes.files import load_recipe, recipe_root
from swin_dense.workbench.recipes.zoo import beside_published, find_recipe, published_weights
from tests.checkpoint.test_downloads import Server
from tests.processes import cli

RECIPE = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
# Make its model small.
SMALL = [
    'model.backbone.embed_dims=8',
    'model.backbone.depths=1,1,1,1',
    'model.backbone.num_heads=1,1,2,2',
    'model.neck.in_channels=8,16,32,64',
    'model.roi_head.bbox_head.fc_out_channels=16',
    'model.test_cfg.rcnn.score_thr=0.0',
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with an image; downloads are kept in a folder below it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    Image.new('RGB', (60, 40)).save('photo.jpg')
    return tmp_path


@pytest.fixture
def publish(folder, monkeypatch):
    """Return a function that replaces the published address of the recipe."""
    (folder / 'recipes').mkdir()
    for name in ('configs', 'model-index.yml'):
        copy = shutil.copytree if name == 'configs' else shutil.copy
        copy(recipe_root() / name, folder / 'recipes' / name)
    monkeypatch.setattr(_mm, 'recipe_root', lambda: folder / 'recipes')

    def replace(address):
        metafile = folder / 'recipes/configs/mask_rcnn/metafile.yml'
        metafile.write_text(metafile.read_text().replace(published_weights(recipe_root(), RECIPE), address))

    return replace


@pytest.fixture
def server(folder):
    (folder / 'served').mkdir()
    with Server(folder / 'served') as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd
        httpd.shutdown()


def write_weights(path):
    config = load_recipe(RECIPE)
    merge_settings(config, SMALL)
    init_default_scope('mmdet')
    torch.save({'state_dict': MODELS.build(config.model).state_dict(), 'meta': {}}, path)


def test_the_weights_of_a_recipe_are_fetched_once(publish, server, capsys, caplog):
    write_weights(server.folder / 'weights.pth')
    address = f'{server.address}/weights.pth'
    publish(address)
    arguments = ['predict', RECIPE, 'photo.jpg', '--set', *SMALL, '--score', '0', '--device', 'cpu']
    assert main(arguments) == 0
    told = capsys.readouterr().err
    kept = re.search(rf'the weights of {RECIPE} from {address} are in (\S+/weights.pth)$', told, re.M)[1]
    assert f'Downloading {address}' in caplog.text
    with open('predictions/photo.json') as file:
        assert json.load(file)['instances']
    assert main([*arguments, '--force']) == 0
    assert server.requests == 1
    assert kept in capsys.readouterr().err


@pytest.mark.parametrize('words', [[RECIPE], [RECIPE, 'http://127.0.0.1:1/weights.pth']])
def test_without_a_network_the_message_says_where_to_put_the_file(publish, folder, capsys, words):
    publish('http://127.0.0.1:1/weights.pth')
    assert main(['predict', *words, 'photo.jpg']) == 2
    told = capsys.readouterr().err
    assert 'http://127.0.0.1:1/weights.pth cannot be fetched' in told
    assert 'give its path, or copy it to' in told
    assert '<urlopen error' not in told
    assert str(folder / 'cache') in re.search(r'or copy it to (\S+/weights\.pth)$', told, re.M)[1]
    assert not (folder / 'predictions').exists()
    for place in ('annotations', 'val2017'):
        (folder / 'data' / 'coco' / place).mkdir(parents=True)
    (folder / 'data' / 'coco' / 'annotations' / 'instances_val2017.json').touch()
    assert main(['test', *words]) == 2
    assert 'http://127.0.0.1:1/weights.pth cannot be fetched' in capsys.readouterr().err


def test_the_published_figures_stand_beside_the_measured_ones(tmp_path, demo_data):
    """On the demo's images in place of COCO, with its 80 classes, and random weights in place of the published ones."""
    data = shutil.copytree(demo_data / 'coco', tmp_path / 'another place')
    annotations = data / 'annotations/instances_val2017.json'
    coco = json.loads(annotations.read_text())
    names = CocoDataset.METAINFO['classes']
    coco['categories'] = [{'id': index, 'name': name} for index, name in enumerate(names, 1)]
    annotations.write_text(json.dumps(coco))
    write_weights(tmp_path / 'weights.pth')
    loader = ['test_dataloader.num_workers=0', 'test_dataloader.persistent_workers=False']
    settings = [*SMALL, *loader, 'test_dataloader.dataset.pipeline.1.scale=(160,160)']
    options = ['--data-root', data, '--work-dir', tmp_path, '--set', *settings]
    printed = cli('test', RECIPE, tmp_path / 'weights.pth', *options).stdout
    assert re.search(r'^box AP: \d+\.\d measured, 42\.7 published: \d+\.\d lower$', printed, re.M)
    assert re.search(r'^mask AP: \d+\.\d measured, 39\.3 published: \d+\.\d lower$', printed, re.M)
    assert 'published by mmdet 3.3.0, https://github.com/open-mmlab/mmdetection/' in printed


def test_figures_agree_within_the_decimals_that_were_published():
    recipe = find_recipe(recipe_root(), RECIPE)
    lines = beside_published(recipe, {'coco/bbox_mAP': 0.427, 'coco/segm_mAP': 0.395})
    assert lines[:2] == [
        'box AP: 42.7 measured, 42.7 published: agrees',
        'mask AP: 39.5 measured, 39.3 published: 0.2 higher',
    ]
    assert lines[-1] == (
        f'| `{RECIPE}` | 42.7 box AP, 39.3 mask AP | 42.7 box AP, 39.5 mask AP | YOUR NAME | LINK TO THE LOG |'
    )
    assert beside_published(recipe, {'coco/bbox_mAP': 0.5}, tta=True) == []
    recipe = find_recipe(recipe_root(), UPERNET)
    one, *_ = beside_published(recipe, {'mIoU': 44.51})
    assert one == 'mIoU: 44.51 measured, 44.41 published: 0.10 higher'
    one, *_ = beside_published(recipe, {'mIoU': 45.79}, tta=True)
    assert one == 'mIoU(ms+flip): 45.79 measured, 45.79 published: agrees'
    assert find_recipe(recipe_root(), 'mine') is None


def test_data_that_are_not_there_are_an_error_before_any_weights_are_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('swin_dense.commands.test.checkpoint_file', lambda place: pytest.fail(f'{place} is fetched'))
    monkeypatch.chdir(tmp_path)
    assert main(['test', RECIPE, '--data-root', 'no/such']) == 2
    error = capsys.readouterr().err
    assert 'there is no no/such/annotations/instances_val2017.json, no no/such/val2017' in error
    assert 'correct --data-root no/such' in error


def test_a_config_file_has_no_published_weights(tmp_path, capsys):
    (tmp_path / 'mine.py').write_text('model = dict()')
    assert main(['test', str(tmp_path / 'mine.py')]) == 2
    assert f'swin-dense test {tmp_path}/mine.py CHECKPOINT' in capsys.readouterr().err


def test_an_exported_file_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / 'model.onnx').write_bytes(b'')
    assert main(['test', RECIPE, str(tmp_path / 'model.onnx')]) == 2
    assert 'is an exported file, not a checkpoint: examples/evaluate_file.py scores it' in capsys.readouterr().err


def test_an_unknown_recipe_is_no_recipe_without_weights(capsys):
    assert main(['test', RECIPE[: RECIPE.index('-p4')]]) == 2
    assert f'no recipe and no config file {RECIPE[: RECIPE.index("-p4")]!r}; did you mean {RECIPE!r}' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ('name', 'start', 'end'),
    [
        (RECIPE, 'https://', f'/{RECIPE.replace("-", "_", 1)}_20210902_120937-9d6b7cfa.pth'),
        ('dino-5scale_swin-l_8xb2-12e_coco', 'https://', '.pth'),
        ('upernet_swin-demo', '', ''),
    ],
)
def test_the_address_of_a_recipe(name, start, end, capsys):
    address = published_weights(recipe_root(), name)
    assert address.startswith(start)
    assert address.endswith(end) if end else address == ''
    assert main(['zoo', *name.split('-')[:2]]) == 0  # `zoo` finds it
    assert f'{name}\n' in capsys.readouterr().out
