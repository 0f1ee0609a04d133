"""Feature distillation by `swin-dense config`, `teach` and `train`: logs, pictures, resuming, stored maps, refusals."""

import re

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from swin_dense import FeatureDistillation, SwinBackbone, create_backbone
from swin_dense.mm import HeldOutLoss
from swin_dense.pretraining.teacher_sources import licence_of, load_teacher
from swin_dense.recipes.files import load_recipe
from tests.conftest import TINY, randomize
from tests.mm.tiny_pretraining import last_picture, write_config
from tests.processes import cli, cli_of_two_ranks

RECIPE = 'distill_swin-t-p4-w7_100e_224x224'
# A Swin whose heads its shapes tell, as those of the published sizes do: 32 channels each.
TEACHER = {'embed_dims': 32, 'depths': (1, 1, 1, 1), 'num_heads': (1, 2, 4, 8), 'window_size': 2}


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp('teacher') / 'teacher.pth'
    torch.save(randomize(SwinBackbone(**TEACHER)).state_dict(), path)
    return path


@pytest.fixture(scope='module')
def config(photos, teacher, tmp_path_factory):
    out = tmp_path_factory.mktemp('configs') / 'mine.py'
    write_config(out, RECIPE, photos, '--teacher', teacher, settings=['model.mask_ratio=0.6'])
    return out


@pytest.fixture(scope='module')
def trained(config):
    done = cli('train', config, '--work-dir', config.parent / 'run')
    return config.parent / 'run', done.stdout


def test_held_out_error_pictures_and_checkpoints(trained):
    _, (target, prediction), _ = last_picture(*trained, 'loss_features', parts=4)
    for shown in (target, prediction):  # in cells of 32 pixels
        cells = shown.reshape(2, 32, 2, 32, 3)
        assert (cells == cells[:, :1, :, :1]).all()
    assert (target != prediction).any()
    assert {target.min(), target.max()} == {0, 255}


def test_the_checkpoint_has_no_teacher_and_loads_without_heads(trained):
    checkpoint = str(trained[0] / 'epoch_5.pth')
    names = list(torch.load(checkpoint, weights_only=False)['state_dict'])
    assert not [name for name in names if 'teacher' in name]
    assert {name.partition('.')[0] for name in names} == {'backbone', 'heads', 'mask_token', 'statistics'}
    made = create_backbone(checkpoint=checkpoint, num_heads=TINY['num_heads'])
    assert made.out_strides == (4, 8, 16, 32)


@pytest.mark.slow
def test_two_processes_train_together(config, tmp_path):
    settings = ['--set', 'train_cfg.max_epochs=2']
    done = cli_of_two_ranks('train', config, '--launcher', 'pytorch', '--work-dir', tmp_path, *settings)
    assert len(re.findall('held_out/error: ', done.stdout)) == 2
    assert len(list(tmp_path.glob('*/vis_data/vis_image/*.png'))) == 2
    state = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['state_dict']
    crops = 2 * 5  # of each process: two epochs of one step with five crops
    cells = [16 * 16, 8 * 8, 4 * 4, 2 * 2]
    assert [state[f'statistics.{level}.count'].item() for level in range(4)] == [crops * count for count in cells]


@pytest.mark.slow
def test_maps_that_were_written_once_train_without_the_teacher(config, photos, teacher, tmp_path):
    done = cli('teach', config, '--out', tmp_path / 'maps', '--views', '2', '--dtype', 'float32', '--device', 'cpu')
    assert 'wrote the maps of 19 of 19 crops' in done.stdout
    stored, _ = write_config(
        tmp_path / 'small.py', RECIPE, photos, '--teacher', tmp_path / 'maps', settings=['model.mask_ratio=0.6']
    )
    assert stored.train_dataloader.dataset.maps == stored.val_dataloader.dataset.maps == str(tmp_path / 'maps')
    teacher.rename(tmp_path / 'gone.pth')
    try:
        found = cli('train', tmp_path / 'small.py', '--work-dir', tmp_path / 'small').stdout
    finally:
        (tmp_path / 'gone.pth').rename(teacher)
    errors = [float(error) for error in re.findall(r'held_out/error: ([\d.]+)', found)]
    assert len(errors) == 5
    assert errors[-1] < errors[0]
    done = cli('teach', tmp_path / 'small.py', '--out', tmp_path / 'more', check=False)
    assert done.returncode == 2
    assert 'is already a folder of maps' in done.stderr
    settings = ['--set', 'train_dataloader.dataset.maps=None', 'val_dataloader.dataset.maps=None']
    done = cli('train', tmp_path / 'small.py', '--work-dir', tmp_path / 'no', *settings, check=False)
    assert done.returncode == 2
    assert 'the data sets do not read it' in done.stderr


def test_the_licence_is_printed(photos, teacher, tmp_path):
    _, said = write_config(tmp_path / 'mine.py', RECIPE, photos, '--teacher', teacher)
    assert f'the licence of the teacher {teacher} is not known; read it' in said
    assert licence_of('swin_b.in22k') == 'MIT'
    folder = tmp_path / 'model'
    folder.mkdir()
    assert licence_of(str(folder)) is None
    for text, licence in (
        ('---\ntags: [x]\nlicense: apache-2.0\n---\n# A model', 'apache-2.0'),
        ('---\nlicense: other\nlicense_name: "dinov3-license"\n---\n', 'dinov3-license'),
        ('# A model\nlicense: mit', None),
    ):
        (folder / 'README.md').write_text(text)
        assert licence_of(str(folder)) == licence


def model_with(teacher, **options):
    backbone = {'type': 'SwinDense', **TINY, 'window_size': 2, 'clamp_window': True}
    config = {'type': 'FeatureDistillationPretrainer', 'backbone': backbone, 'teacher': str(teacher), 'mask_patch': 8}
    return MODELS.build({**config, **options})


@pytest.mark.parametrize('mask_ratio', [0.0, 0.5])
def test_the_held_out_loss_is_that_of_each_image_with_its_own_mask(teacher, mask_ratio):
    model = model_with(
        teacher, mask_ratio=mask_ratio, data_preprocessor={'type': 'ImageNormalizer', 'mean': 0.4, 'std': 0.2}
    )
    data = {'inputs': torch.rand(5, 3, 40, 40), 'index': torch.tensor([7, 3, 0, 11, 5])}
    model.train()(model.data_preprocessor(data)['inputs'], mode='loss')
    model.eval()
    with torch.no_grad():
        together = model.val_step(data)
        metric = HeldOutLoss('loss_features')
        metric.process(data, together)
        for i, output in enumerate(together):
            img = model.data_preprocessor({'inputs': data['inputs'][i : i + 1]})['inputs']
            mask = model.draw_mask(img, torch.Generator().manual_seed(int(data['index'][i])))
            (loss,) = FeatureDistillation.forward(model, img, mask=mask).values()
            torch.testing.assert_close(output['loss_features'], loss, atol=1e-5, rtol=1e-5)
            assert output['hidden'].float().mean() == pytest.approx(13 / 25 if mask_ratio else 0)
        mean = sum(output['loss_features'] for output in together) / 5
        assert metric.compute_metrics(metric.results)['error'] == pytest.approx(mean.item())
        assert [one.shape[1] for one in model(data['inputs'])] == [16, 32, 64, 128]


def test_the_teacher_by_name(teacher):
    loaded = load_teacher(str(teacher))
    assert loaded.network.clamp_window
    with torch.device('meta'):
        assert load_teacher('swin_b.in22k').out_channels == (128, 256, 512, 1024)
        assert load_teacher(str(teacher)).out_channels == (32, 64, 128, 256)
    with pytest.raises(TypeError, match='teacher must be a text'):
        load_teacher(None)


@pytest.mark.parametrize(
    ('name', 'arch', 'channels'),
    [(RECIPE, 't', (128, 256, 512, 1024)), ('distill_swin-b-p4-w7_100e_224x224', 'b', (192, 384, 768, 1536))],
)
def test_the_recipes_build(name, arch, channels):
    """On the meta device, on which no weights are fetched."""
    config = load_recipe(name)
    with torch.device('meta'):
        model, expected = MODELS.build(config.model), SwinBackbone(arch)
    shapes, wanted = (
        {key: value.shape for key, value in one.state_dict().items()} for one in (model.backbone, expected)
    )
    assert shapes == wanted
    assert model.teacher.out_channels == channels
    assert model.levels == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert [head[-1].out_features for head in model.heads] == list(channels)
    assert config.train_dataloader.dataset.crop_size == config.val_dataloader.dataset.crop_size == 224
    assert config.val_evaluator.loss == config.custom_hooks[0].loss == 'loss_features'


WRONG = {
    'no file': ({'model.teacher': 'nowhere.pth'}, 'nowhere.pth'),
    'no transformers': ({'model.teacher': 'facebook/dinov2-small'}, 'needs transformers'),
    'bands': ({'model.backbone.in_channels': 4}, 'images with 3 channels, the backbone with 4'),
}


@pytest.mark.parametrize('case', WRONG)
def test_wrong_input_is_one_clear_error_before_training(case, config, tmp_path):
    settings, words = WRONG[case]
    changed = Config.fromfile(config)
    changed.merge_from_dict(settings)
    changed.dump(tmp_path / 'wrong.py')
    done = cli('train', tmp_path / 'wrong.py', '--work-dir', tmp_path / 'run', check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert 'Traceback' not in done.stderr
    assert not (tmp_path / 'run').exists()


def test_only_these_recipes_take_a_teacher(photos, tmp_path):
    recipe = 'simmim_swin-t-p4-w6_100e_192x192'
    done = cli('config', recipe, '--data-root', photos, '--teacher', 'swin_b.in22k', check=False)
    assert done.returncode == 2
    assert '--teacher is for recipes of feature distillation only' in done.stderr
