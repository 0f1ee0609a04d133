"""Lazy configs, whose types are imported classes, serve every command that reads a config."""

import json
from itertools import count

import mmcv.transforms  # noqa: F401  registers LoadImageFromFile
import mmdet.registry  # noqa: F401
import mmengine.registry
import mmseg.registry  # noqa: F401
import pytest
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, Registry

import swin_dense.mm
from swin_dense.commands._main import main
from swin_dense.workbench.recipes.files import load_recipe, recipe_names
from tests.conftest import some
from tests.processes import cli
from tests.workbench.configs.data import DETECTOR, SEGMENTOR

REGISTRIES = [one for one in vars(mmengine.registry).values() if isinstance(one, Registry)]
# Classes of this package, which have no bare names in files without custom_imports.
OURS = {name: f'swin_dense.mm.backbone.{name}' for name in ('SwinDense', 'SwinDenseV2')}
OURS['SwinLayerDecayConstructor'] = 'swin_dense.mm.layer_decay.SwinLayerDecayConstructor'
NEEDS_PACKAGES = ('glip', 'grounding')  # text encoders, which are not installed


def as_lazy(config):
    """Return the source of a lazy config that imports each type of a config of names."""
    imports, numbers = {}, count()

    def source(value, key=None):
        if isinstance(value, dict):
            inner = ', '.join(f'{name!r}: {source(item, name)}' for name, item in value.items())
            return f'{{{inner}}}'
        if isinstance(value, (list, tuple)):
            inner = ''.join(f'{source(item)}, ' for item in value)
            return f'[{inner}]' if isinstance(value, list) else f'({inner})'
        kind = found(value, config.default_scope) if key in ('type', 'constructor') else None
        if kind is None:  # also of 'nms' and the like, which no registry knows
            return repr(value)
        if value not in imports:
            imports[value] = f'Imported{next(numbers)}', f'from {kind.__module__} import {kind.__name__} as'
        return imports[value][0]

    entries = {name: item for name, item in config.items() if name not in ('custom_imports', 'default_scope')}
    lines = [f'{name} = {source(item)}' for name, item in entries.items()]
    return '\n'.join([*(f'{start} {name}' for name, start in imports.values()), *lines, ''])


def found(name, scope):
    """Return the class or function that a scope finds by a name, or None."""
    if name in OURS:
        return getattr(swin_dense.mm, name)
    for hides_others in (True, False):
        for registry in REGISTRIES:
            child = registry.children.get(scope) if hides_others else registry
            if child is not None:
                child.import_from_location()
                if name in child.module_dict:
                    return child.module_dict[name]
    return None


def names_of(value):
    """Return a config as plain Python types, with the names that SwinDense has in files without custom_imports."""
    if isinstance(value, dict):
        return {key: names_of(item) for key, item in value.items() if key not in ('_scope_', 'custom_imports')}
    if isinstance(value, (list, tuple)):
        return list(map(names_of, value))
    return OURS.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize('name', some([one for one in recipe_names() if not one.startswith(NEEDS_PACKAGES)], 12))
def test_a_lazy_config_is_read_as_the_config_of_names(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / 'lazy.py'
    path.write_text(as_lazy(recipe))
    assert Config.fromfile(path).model.type.__name__ == recipe.model.type
    assert names_of(load_recipe(str(path)).to_dict()) == names_of(recipe.to_dict())


SMALL = 'model.backbone.depths=[1,1,1,1]'
SHORT = {
    DETECTOR: [SMALL, 'train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=1'],
    SEGMENTOR: [SMALL, 'train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'default_hooks.checkpoint.interval=2'],
}


@pytest.mark.slow
@pytest.mark.parametrize('data', ['fruit', 'roads'])
def test_every_command_runs_with_a_lazy_config(request, data, tmp_path, capsys):
    own = request.getfixturevalue(data)
    written = own.write('--set', *SHORT[own.recipe])
    names, lazy, again, work = (tmp_path / name for name in ('mine.py', 'lazy.py', 'again.py', 'work'))
    lazy.write_text(as_lazy(written))
    assert main(['config', str(lazy), '--out', str(again)]) == 0
    assert names_of(Config.fromfile(again).to_dict()) == names_of(written.to_dict())
    cli('train', lazy, '--work-dir', work)
    (checkpoint,) = work.glob('*.pth')
    tested = cli('test', lazy, checkpoint, '--work-dir', tmp_path / 'tested')
    assert ('segm_mAP' if own.recipe == DETECTOR else 'mIoU') in tested.stdout + tested.stderr
    image = next(own.root.rglob('*.[jp][pn]g'))
    results = {}
    for config in (names, lazy):
        out = tmp_path / config.stem
        assert main(['predict', str(config), str(checkpoint), str(image), '--out', str(out), '--score', '0']) == 0
        capsys.readouterr()
        assert main(['flops', str(config), '--size', '64', '64', '--json']) == 0
        results[config] = json.loads((out / f'{image.stem}.json').read_text()), capsys.readouterr().out
    assert results[lazy] == results[names]
    if own.recipe == SEGMENTOR:  # which is exported sooner
        out = tmp_path / 'whole.onnx'
        assert main(['export', str(lazy), str(checkpoint), '--out', str(out), '--image', str(image)]) == 0


def test_what_is_wrong_with_the_data_of_a_lazy_config_is_said(fruit, tmp_path, capsys):
    (tmp_path / 'lazy.py').write_text(as_lazy(fruit.write()))
    fruit.change(lambda content: content['annotations'][0].update(bbox=[1, 2]))
    assert main(['train', str(tmp_path / 'lazy.py'), '--work-dir', str(tmp_path / 'work')]) == 2
    assert 'bbox must be x, y, width and height' in capsys.readouterr().err


def test_names_stand_for_the_classes_that_were_imported(tmp_path):
    """A class of another package, or one that no registry knows, keeps the path of its import."""
    lines = [
        'from mmcv.transforms import LoadAnnotations as OfMmcv',
        'from mmdet.datasets.transforms import LoadAnnotations',
        'from mmdet.models import FCOS',
        'from mmdet.models.layers import ExpMomentumEMA',
        'from mmengine.hooks import EMAHook',
        'from mmseg.models import EncoderDecoder',
        'from torch import nn',
        'from tests.workbench.tiny_training import TinyRegressor',
        'import swin_dense',
        'model = dict(type=FCOS, backbone=dict(type=swin_dense.SwinDense, act_cfg=dict(type=nn.GELU)))',
        'others = [dict(type=kind) for kind in (OfMmcv, LoadAnnotations, EncoderDecoder, TinyRegressor)]',
        'hook = dict(type=EMAHook, ema_type=ExpMomentumEMA)',
    ]
    path = tmp_path / 'lazy.py'
    path.write_text('\n'.join(lines))
    config = load_recipe(str(path))
    assert config.default_scope == 'mmdet'
    assert config.model.type == 'FCOS'
    assert config.model.backbone == {'type': 'swin_dense.SwinDense', 'act_cfg': {'type': 'GELU'}}
    names = ['mmcv.transforms.LoadAnnotations', 'LoadAnnotations', 'mmseg.EncoderDecoder']
    assert [other.type for other in config.others] == [*names, 'tests.workbench.tiny_training.TinyRegressor']
    assert config.hook.type == 'EMAHook'
    assert config.hook.ema_type.__name__ == 'ExpMomentumEMA'  # the class, as the user's own code may expect it
    with TRANSFORMS.switch_scope_and_registry('mmdet') as registry:
        packages = [registry.get(other.type).__module__.partition('.')[0] for other in config.others[:2]]
    assert packages == ['mmcv', 'mmdet']


def test_a_value_that_no_name_stands_for_is_not_written(fruit, tmp_path, capsys):
    source = as_lazy(fruit.write())
    (tmp_path / 'lazy.py').write_text(f"from torch import float16\n{source}model['dtype'] = float16\n")
    assert main(['config', str(tmp_path / 'lazy.py'), '--out', str(tmp_path / 'other.py')]) == 2
    assert 'model.dtype is torch.float16, which the config imports' in capsys.readouterr().err
    assert not (tmp_path / 'other.py').exists()
