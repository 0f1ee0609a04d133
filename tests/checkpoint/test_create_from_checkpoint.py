"""Building backbones and classifiers from checkpoints, whose options are inferred."""

import re

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict
from tests.checkpoint.helpers import ARCH, IMAGE, build, load, official_classifier, raises_and_keeps, same_outputs
from tests.conftest import assert_within, equal_weights, randomize


def build_v2(seed, **options):
    return randomize(SwinV2Backbone(**{**ARCH, **options}), seed)


class TestCreateBackbone:
    @pytest.fixture
    def source(self):
        # Unusual head dimensions, and a window that only the index buffers determine.
        return build(
            1,
            num_heads=(1, 1, 4, 8),
            window_size=(5, 3),
            in_channels=2,
            patch_size=2,
            out_indices=(1, 2, 3),
            mlp_ratio=2.0,
            qkv_bias=False,
            use_abs_pos_embed=True,
            pretrain_img_size=32,
        )

    def test_options_are_inferred_from_the_file(self, tmp_path, source):
        torch.save({'state_dict': export_state_dict(source, 'mmseg')}, tmp_path / 'swin.pth')
        made = create_backbone(checkpoint=tmp_path / 'swin.pth').double()
        assert not made.training
        assert made.arch == source.arch
        assert made.window_size == (5, 3)
        assert made.out_indices == (1, 2, 3)
        image = IMAGE[:, :2]
        assert_within(made(image), source(image), 1e-4)

    def test_given_options_override_inferred_ones(self, caplog):
        state = build(1, window_size=5).state_dict()
        arch = {key: ARCH[key] for key in ('embed_dims', 'depths', 'num_heads')}
        assert create_backbone('swin_t', state, **arch).window_size == (5, 5)
        made = create_backbone(checkpoint=state, window_size=7, out_indices=(0,))
        assert made.window_size == (7, 7)
        assert made.out_indices == (0,)
        assert 'window 5x5 to 7x7, bicubic' in caplog.text
        with pytest.raises(CheckpointError, match='a Swin with depths'):
            create_backbone('swin_t', state)

    def test_v2_gets_its_pretrained_window_sizes(self):
        source = build_v2(1, window_size=8, pretrained_window_size=(4, 4, 4, 2))
        made = create_backbone(checkpoint=export_state_dict(source, 'official'))
        assert type(made) is SwinV2Backbone
        assert made.window_size == (8, 8)
        assert made.pretrained_window_size == (4, 4, 4, 2)
        assert equal_weights(made, source)
        unrecorded = export_state_dict(source, 'timm')
        for options, asked in (
            ({}, r'give window_size and pretrained_window_size$'),
            ({'window_size': 8}, r'give pretrained_window_size$'),  # the given window is not that of the training
            ({'pretrained_window_size': 4}, r'give window_size$'),
        ):
            with pytest.raises(CheckpointError, match=asked):
                create_backbone(checkpoint=unrecorded, **options)
        made = create_backbone(checkpoint=unrecorded, window_size=8, pretrained_window_size=(4, 4, 4, 2))
        assert_within(made.double()(IMAGE), source.double().eval()(IMAGE), 1e-9)
        with pytest.raises(CheckpointError, match=r'a Swin V2; the model is a Swin V1\.\n? Build SwinV2Backbone'):
            create_backbone('swin_t', source.state_dict())

    @pytest.mark.parametrize('family', ['official', 'mmpretrain', 'torchvision'])
    @pytest.mark.parametrize('windows', [(2, 2, 4, 4), (4, 4, 2, 2), (4, 4, 4, 2), (4, 2, 4, 2)], ids=str)
    def test_v2_of_other_libraries_keeps_a_window_per_stage(self, family, windows):
        source = build_v2(1, window_size=[(side, side) for side in windows])
        state = export_state_dict(source, family)
        assert [side for side, _ in create_backbone(checkpoint=state).windows] == list(windows)
        # Without its output norms, it may be a classifier, whose windows shrink to its maps, and never grow.
        state = {name: x for name, x in state.items() if not name.startswith('norm')}
        is_shrunk = windows == (4, 4, 4, 2)
        made = create_backbone(checkpoint=state)
        assert [side for side, _ in made.windows] == [4, 4, 4, 4] if is_shrunk else list(windows)
        assert made.spec().trained_windows == source.windows

    def test_windows_that_a_file_does_not_record_are_asked_for(self):
        without_tables = build(1, window_size=5, use_rel_pos_bias=False)
        oblong = build(1, window_size=(5, 3))
        for source in (without_tables, oblong):
            options = {'checkpoint': source.state_dict(), 'num_heads': ARCH['num_heads']}
            with pytest.raises(CheckpointError, match=r'give window_size$'):
                create_backbone(**options)
            made = create_backbone(**options, window_size=source.window_size).double()
            same_outputs(made, source.float().double())

    def test_v2_windows_that_shrink_to_small_maps(self):
        """Only with clamp_window=True, and if the windows of the first stage are those of the training."""
        source = build_v2(1, window_size=4, pretrained_window_size=(4, 4, 4, 2))
        state = export_state_dict(source, 'official')
        clamped = build_v2(2, window_size=4, clamp_window=True)
        load(clamped, state)
        assert equal_weights(clamped, source)
        advice = re.escape('of 4x4, 4x4, 4x4, 2x2 tokens per stage') + '.*' + re.escape('size=(4, 4, 4, 2)')
        raises_and_keeps(build_v2(2, window_size=4), state, advice)
        raises_and_keeps(build_v2(2, window_size=4, clamp_window=True, pretrained_window_size=3), state, advice)

    def test_flat_positions_of_a_non_square_grid_need_pretrain_img_size(self):
        source = build(1, use_abs_pos_embed=True, pretrain_img_size=(32, 48))
        with pytest.raises(CheckpointError, match=r'96 absolute .* give pretrain_img_size'):
            create_backbone(checkpoint=source.state_dict())
        made = create_backbone(checkpoint=source.state_dict(), pretrain_img_size=(32, 48)).double()
        same_outputs(made, source.float().double())
        assert create_backbone(checkpoint=export_state_dict(source, 'official')).position_grid == (8, 12)

    def test_an_architecture_or_a_checkpoint_is_required(self):
        with pytest.raises(TypeError, match=r"\('swin_t'\), or a checkpoint"):
            create_backbone()

    def test_names_of_timm_and_the_authors_are_explained(self):
        with pytest.raises(ValueError, match="'swin_l' with window_size=12"):
            create_backbone('swin_large_patch4_window12_384.ms_in22k')
        with pytest.raises(ValueError, match="'swinv2_b' with window_size=16"):
            create_backbone('swinv2_base_window16_256')


class TestClassifier:
    @pytest.fixture
    def state(self):
        """A checkpoint as the authors' code saves it."""
        return official_classifier(build(1))

    @pytest.fixture
    def classifier(self):
        return randomize(SwinClassifier(num_classes=10, **ARCH).double().eval(), 2)

    def test_backbone_final_norm_and_head_load(self, state, classifier):
        report = load(classifier, state)
        assert not report.missing
        assert not report.unexpected
        assert not report.resized
        assert {'head.weight', 'norm3.bias', 'stages.0.blocks.0.norm1.weight'} <= set(report.loaded)
        assert not any('head' in key for key in report.left_out)
        assert torch.equal(classifier.head.weight, state['model']['head.weight'].double())
        assert torch.equal(classifier.backbone.norm3.bias, state['model']['norm.bias'].double())
        again = SwinClassifier(num_classes=10, **ARCH).double()
        again.load_state_dict(state)
        assert equal_weights(again, classifier)

    def test_another_number_of_classes(self, state, classifier):
        other = official_classifier(build(1), classes=7)
        raises_and_keeps(classifier, other, 'build the model with num_classes=7')
        head = classifier.head.weight.clone()
        report = load(classifier, other, allow_partial=True)
        assert set(report.mismatched) == {'head.weight', 'head.bias'}
        assert torch.equal(classifier.head.weight, head)
        assert torch.equal(classifier.backbone.norm3.bias, other['model']['norm.bias'].double())

    @pytest.mark.parametrize(
        ('absent', 'message', 'missing'),
        [
            ('head', 'no linear head', {'head.weight', 'head.bias'}),
            ('norm.', r'norm3\.weight', {'norm3.weight', 'norm3.bias'}),
        ],
    )
    def test_an_incomplete_classifier(self, state, classifier, absent, message, missing):
        part = {key: x for key, x in state['model'].items() if not key.startswith(absent)}
        raises_and_keeps(classifier, part, message)
        assert set(load(classifier, part, allow_partial=True).missing) == missing


@pytest.mark.parametrize('ratio', [4, 3.3, 2.5, 3.333, 0.7, 1 / 3])
@pytest.mark.parametrize('network', [SwinBackbone, SwinV2Backbone])
def test_any_ratio_of_the_mlps(network, ratio):
    """The hidden channels are rounded down, so that no quotient of two shapes is the ratio."""
    source = network(**{**ARCH, 'embed_dims': 24}, mlp_ratio=ratio)
    made = create_backbone(checkpoint={'model': source.state_dict()})
    assert equal_weights(made, source)
