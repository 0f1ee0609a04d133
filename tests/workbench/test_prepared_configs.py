"""What the options of `swin-dense test` and `swin-dense train` change in a config, with the frameworks that read it."""

import runpy
from pathlib import Path

import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope

from swin_dense import SwinBackbone
from swin_dense.mm import swin_auto_wrap_policy
from swin_dense.workbench.recipes.files import load_recipe
from swin_dense.workbench.training import prepare_test, prepare_training
from tests.conftest import TINY

DETECTOR, SEGMENTOR = 'mask-rcnn_swin-demo_fpn', 'upernet_swin-demo'


def prepared(name, prepare=prepare_test, changes=(), **options):
    config = load_recipe(name)
    config.update({'work_dir': 'work', 'launcher': 'none', **dict(changes)})
    return prepare(config, *(['a.pth'] if prepare is prepare_test else []), **options)


def test_settings_of_test_time_augmentation_are_used():
    assert prepared(SEGMENTOR).model == load_recipe(SEGMENTOR).model
    config, recipe = prepared(SEGMENTOR, tta=True), load_recipe(SEGMENTOR)
    assert config.model.type == recipe.tta_model.type == 'SegTTAModel'
    assert config.model.module == recipe.model
    assert config.test_dataloader.dataset.pipeline == recipe.tta_pipeline
    recipe.pop('tta_model')
    recipe.update({'work_dir': 'work', 'launcher': 'none'})
    with pytest.raises(ValueError, match='--tta needs tta_model and tta_pipeline'):
        prepare_test(recipe, 'a.pth', tta=True)


def test_detectors_have_the_test_time_augmentation_of_mmdets_own_tool(tmp_path, monkeypatch):
    import mmdet

    base = tmp_path / 'mine.py'
    base.write_text(load_recipe('faster-rcnn_swin-t-p4-w7_fpn_small_coco').pretty_text)
    tool = Path(mmdet.__file__).parent / '.mim' / 'tools' / 'test.py'
    monkeypatch.setattr('sys.argv', ['test.py', str(base), 'a.pth', '--tta', '--work-dir', 'work'])
    built = []

    class Stopped(Exception):
        pass

    def stop(config):
        built.append(config)
        raise Stopped

    monkeypatch.setattr('mmengine.runner.Runner.from_cfg', stop)
    with pytest.raises(Stopped), pytest.warns(UserWarning, match='set it as default'):
        runpy.run_path(str(tool), run_name='__main__')
    ours = prepared(str(base), tta=True)
    assert ours.model == built[0].model
    assert ours.test_dataloader == built[0].test_dataloader


def test_masks_are_left_out_of_test_time_augmentation_or_refused():
    """DetTTAModel raises an AssertionError for masks."""
    init_default_scope('mmdet')
    for name in (DETECTOR, 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'):
        config = prepared(name, tta=True)
        assert config.model.module.roi_head.mask_head is None
        assert config.test_evaluator.metric == 'bbox'
        with torch.device('meta'):
            MODELS.build(config.model)
    for name in (
        'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco',
        'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco-panoptic',
    ):
        with pytest.raises(ValueError, match='a Mask2Former has no mask head that could be left out'):
            prepared(name, tta=True)
    config = load_recipe(DETECTOR)  # evaluated with masks
    config.update({'work_dir': 'work', 'launcher': 'none'})
    config.model = ConfigDict(type='RTMDet', bbox_head=ConfigDict(type='RTMDetInsSepBNHead'))
    with pytest.raises(ValueError, match='a RTMDet has no mask head'):
        prepare_test(config, 'a.pth', tta=True)


def test_predictions_are_written():
    config = prepared(DETECTOR, out='found.pkl')
    assert config.test_evaluator[0] == load_recipe(DETECTOR).test_evaluator
    assert config.test_evaluator[1:] == [{'type': 'DumpDetResults', 'out_file_path': 'found.pkl'}]
    with pytest.raises(ValueError, match=r"\.pkl or \.pickle, got 'found\.json'"):
        prepared(DETECTOR, out='found.json')
    assert prepared(SEGMENTOR, out='labels').test_evaluator.output_dir == 'labels'
    several = [load_recipe(DETECTOR).test_evaluator, ConfigDict(type='VOCMetric')]
    config = prepared(DETECTOR, changes={'test_evaluator': several}, out='found.pkl')
    assert [one['type'] for one in config.test_evaluator] == ['CocoMetric', 'VOCMetric', 'DumpDetResults']
    several = [load_recipe(SEGMENTOR).test_evaluator, ConfigDict(type='CityscapesMetric', output_dir='formatted')]
    config = prepared(SEGMENTOR, changes={'test_evaluator': several}, out='labels')
    assert [one.output_dir for one in config.test_evaluator] == ['labels', 'formatted']


@pytest.mark.parametrize(
    ('kind', 'trained'),
    [('FSDPStrategy', 'ResumableFSDPStrategy'), ('DDPStrategy', 'DDPStrategy'), (None, None)],
)
def test_fully_sharded_training_can_be_resumed(kind, trained):
    changes = {} if kind is None else {'runner_type': 'FlexibleRunner', 'strategy': ConfigDict(type=kind)}
    config = prepared(SEGMENTOR, prepare_training, changes)
    assert (config.get('strategy') or {}).get('type') == trained


def test_fully_sharded_training_shards_by_block():
    backbone = SwinBackbone(**TINY)
    blocks = [block for stage in backbone.stages for block in stage.blocks]
    assert swin_auto_wrap_policy(backbone, recurse=True, nonwrapped_numel=1)
    assert swin_auto_wrap_policy(blocks[0], recurse=True, nonwrapped_numel=1)
    wrapped = [one for one in backbone.modules() if swin_auto_wrap_policy(one, recurse=False, nonwrapped_numel=1)]
    assert wrapped == blocks


def test_mixed_precision_needs_a_gpu():
    if torch.cuda.is_available():
        assert prepared(SEGMENTOR, prepare_training, amp=True).optim_wrapper.type == 'AmpOptimWrapper'
    else:
        with pytest.raises(ValueError, match='--amp needs a CUDA device'):
            prepared(SEGMENTOR, prepare_training, amp=True)
