"""Exported files against the model, at other sizes and batches than recorded; refused models and removed files."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swin_dense import SwinBackbone, SwinV2Backbone, export_model
from swin_dense.commands._main import main
from swin_dense.export import ExportError, formats
from swin_dense.export.pooling import RecordedPool
from swin_dense.export.verify import load
from swin_dense.workbench.runtime.sessions import SESSIONS
from tests.conftest import folders_named_in, needs, randomize
from tests.models.test_ablations import ROWS

needs_onnx = needs('onnxruntime')

TINY = {
    'embed_dims': 16,
    'depths': (1, 2),
    'num_heads': (1, 2),
    'strides': (4, 2),
}
# (batch, height, width): smaller than a patch or a window, odd, long and thin, multiples of patch and window.
SHAPES = [
    (1, 1, 1),
    (3, 1, 300),
    (1, 300, 1),
    (4, 5, 9),
    (1, 28, 28),
    (2, 29, 56),
    (4, 57, 33),
    (1, 70, 76),
    (1, 199, 301),
    (5, 64, 64),
]


def build(**options):
    return randomize(SwinBackbone(**{**TINY, **options})).eval()


def assert_right(run, model, shapes=SHAPES, tolerance=1e-4):
    """Compare all outputs with the model's, relative to their largest value."""
    for batch, height, width in shapes:
        img = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            expected = formats.outputs_of(model(img))
        found = run({'img': img.numpy()})
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            difference = torch.from_numpy(ours) - theirs
            assert difference.abs().max() <= tolerance * theirs.abs().max(), (batch, height, width)


def v2():
    return randomize(SwinV2Backbone(**TINY, window_size=6, pretrained_window_size=8)).eval()


class Classifier(nn.Module):
    """A model that contains a backbone and returns a dict."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.out_channels[-1], 5)

    def forward(self, img):
        maps = self.backbone(img)
        means = maps[-1].mean((2, 3))
        return {'maps': maps, 'logits': self.head(means)}


class Pooled(nn.Module):
    """A backbone followed by adaptive pooling, as in decode heads."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.pools = nn.ModuleList([nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((3, 6))])

    def forward(self, img):
        (out,) = self.backbone(img)
        return [out, *(pool(out) for pool in self.pools)]


SIDES = st.integers(1, 30)
BINS = st.integers(1, 7)


@given(SIDES, SIDES, BINS, BINS)
def test_pooling_equals_torchs(height, width, rows, columns):
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    expected = nn.functional.adaptive_avg_pool2d(x, (rows, columns))
    torch.testing.assert_close(RecordedPool(rows, columns)(x), expected)


@pytest.mark.parametrize(
    ('version', 'dynamic'),
    [
        ('2.9.1', True),
        ('2.8.0', False),
    ],
)
def test_a_torch_that_cannot_write_a_file_is_refused_by_name(version, dynamic, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, '__version__', version)
    with pytest.raises(ImportError, match=rf'2\.10 or later.*2\.9, got {version}'):
        export_model(build(), tmp_path / 'tiny.pt2', dynamic=dynamic)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_onnx
@pytest.mark.long
def test_dynamic_onnx_is_right_at_every_size_in_both_runtimes(tmp_path):
    model = Pooled(
        build(
            window_size=(5, 7),
            use_abs_pos_embed=True,
            pretrain_img_size=40,
            out_indices=(1,),
        )
    )
    path = tmp_path / 'a b.onnx'
    exported = export_model(model, path, size=(75, 100))
    assert len(exported.errors) == 3
    assert list(tmp_path.iterdir()) == [path]
    assert_right(SESSIONS['onnxruntime'](path, 1).run, model)
    pytest.importorskip('openvino')
    assert_right(SESSIONS['openvino'](path, 1).run, model)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    'model',
    [
        Classifier(build(window_size=12)),
        v2(),
        build(pretrain_img_size=40, **ROWS['absolute']),
    ],
    ids=['classifier', 'v2', 'absolute'],
)
def test_dynamic_program_is_right_at_every_size(tmp_path, model):
    export_model(model, tmp_path / 'x.pt2', size=(75, 100), check=False)
    assert_right(load(tmp_path / 'x.pt2'), model)


@pytest.mark.parametrize(
    'model',
    [
        build(use_abs_pos_embed=True, pretrain_img_size=40),
        build(
            depths=(2, 1),
            window_size=(5, 12),
            patch_size=2,
            strides=(2, 3),
            out_indices=(0,),
        ),
        v2(),
        Classifier(build(qkv_bias=False, use_rel_pos_bias=False, use_shift=False)).eval(),
        build(**ROWS['no appearance']),
        build(pretrain_img_size=40, **ROWS['absolute']),
    ],
    ids=['position', 'strides', 'v2', 'classifier', 'no appearance', 'absolute'],
)
def test_dynamic_torchscript_is_right_at_every_size(tmp_path, model):
    export_model(model, tmp_path / 'x.ts', check=False)
    assert_right(load(tmp_path / 'x.ts'), model)


class TestStatic:
    """Export for one image size: tables and masks are constants, and the graph does not compute sizes."""

    SIZE = (75, 100)

    MODEL = build(depths=(2, 1), use_abs_pos_embed=True, pretrain_img_size=40)

    @pytest.mark.slow
    @pytest.mark.long
    @needs_onnx
    def test_onnx_with_a_free_batch(self, tmp_path):
        import onnx

        path = tmp_path / 'x.onnx'
        export_model(
            self.MODEL,
            path,
            dynamic=False,
            size=self.SIZE,
            batch=None,
            check=False,
        )
        graph = onnx.load(path).graph
        axes = graph.input[0].type.tensor_type.shape.dim
        assert [axis.dim_param or axis.dim_value for axis in axes] == ['batch', 3, *self.SIZE]
        operators = {node.op_type for node in graph.node}
        # Concat joins the neighbours of a patch merging, and the amounts of Pad are constants.
        assert not operators & {'Shape', 'Range', 'Div', 'Mod', 'Less', 'Equal', 'Expand'}
        assert_right(
            load(path),
            self.MODEL,
            [(batch, *self.SIZE) for batch in (1, 2, 5)],
        )

    @pytest.mark.parametrize('suffix', ['pt2', 'ts'])
    def test_torchs_formats(self, tmp_path, suffix):
        path = tmp_path / f'x.{suffix}'
        export_model(self.MODEL, path, dynamic=False, size=self.SIZE)
        assert_right(
            load(path),
            self.MODEL,
            [(1, *self.SIZE)],
        )
        if suffix == 'pt2':
            program = torch.export.load(path)
            names = {name for name, _ in self.MODEL.named_parameters()}
            folded = {name for name in names if name.endswith(('pos_embed', 'bias_table'))}
            assert dict(program.named_parameters()).keys() == names - folded
            operators = {str(node.target) for node in program.graph.nodes}
            assert not operators & {'aten.arange.default', 'aten.where.ScalarOther', 'aten.unfold.default'}

    def test_clamped_windows(self, tmp_path):
        model = build(depths=(2, 1), clamp_window=True)
        export_model(model, tmp_path / 'x.ts', dynamic=False, size=(20, 64))
        assert_right(load(tmp_path / 'x.ts'), model, [(1, 20, 64)])


@pytest.mark.parametrize('suffix', [pytest.param('onnx', marks=[pytest.mark.slow, needs_onnx]), 'pt2', 'ts'])
@pytest.mark.parametrize('dynamic', [True, False])
def test_files_name_no_folder_of_this_machine(tmp_path, suffix, dynamic):
    path = tmp_path / f'x.{suffix}'
    export_model(build(depths=(1,), num_heads=(1,), strides=(4,)), path, dynamic=dynamic, size=32, check=False)
    assert folders_named_in(path) == []


def test_a_compiled_model_is_exported_without_the_compilation(tmp_path):
    model = build()
    exported = export_model(torch.compile(model, backend='eager'), tmp_path / 'a.ts', size=32)
    assert_right(load(exported.path), model, shapes=[(2, 45, 33)])


def test_another_default_device(tmp_path):
    model = build()
    with torch.device('meta'):
        exported = export_model(model, tmp_path / 'a.ts', size=32)
    assert_right(load(exported.path), model, shapes=[(2, 45, 33)])


@pytest.mark.slow
@needs_onnx
def test_half_precision(tmp_path, caplog):
    model = build()
    caplog.set_level(logging.INFO, 'swin_dense.export')
    exported = export_model(
        model,
        tmp_path / 'x.onnx',
        dynamic=False,
        size=64,
        half=True,
    )
    (error,) = exported.errors.values()
    assert 1e-6 < error < 2e-2
    assert [message.split()[0] for message in caplog.messages] == ['tracing', 'converting', 'comparing']
    img = torch.randn(1, 3, 64, 64).half()
    out = load(tmp_path / 'x.onnx')({'img': img.numpy()})
    assert {part.dtype.name for part in out} == {'float16'}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


class Batched(nn.Module):
    """A model whose recording is right only at the recorded batch size."""

    def __init__(self):
        super().__init__()
        self.backbone = build(
            depths=(1,),
            num_heads=(1,),
            strides=(4,),
        )

    def forward(self, img):
        (out,) = self.backbone(img)
        return out * int(img.shape[0])


class Sized(Batched):
    """A model whose recording returns wrong shapes at other image sizes."""

    def forward(self, img):
        (out,) = self.backbone(img)
        return out.flatten(2)[..., : int(img.shape[2])]


class Single(Batched):
    """A model whose recording is wrong only for one image."""

    def forward(self, img):
        (out,) = self.backbone(img)
        return out if img.shape[0] > 1 else out + 1


@pytest.mark.parametrize(
    'model',
    [Batched(), Sized(), Single()],
    ids=['numbers', 'shapes', 'one image'],
)
def test_a_wrong_file_is_removed_and_the_old_file_is_kept(tmp_path, model):
    (tmp_path / 'x.ts').write_text('of yesterday')
    with pytest.raises(ExportError, match='the file is wrong on an image'):
        export_model(model, tmp_path / 'x.ts')
    assert [path.read_text() for path in tmp_path.iterdir()] == ['of yesterday']


class TwoClamps(Batched):
    """A model that clamps one value twice with constants."""

    def forward(self, img):
        (out,) = self.backbone(img)
        return out.clamp(0, 1), out.clamp(0, 2)


def test_a_model_that_cannot_be_recorded_raises(tmp_path):
    with pytest.raises(ExportError, match='if it branches on sizes, dynamic=False'):
        export_model(Batched(), tmp_path / 'x.pt2', size=32)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize(
    ('model', 'opset', 'message'),
    [
        # onnxscript replaces both by Clip with bounds of the same names, and writes an invalid file.
        (TwoClamps(), 20, 'the file does not run on an image'),
        (build(out_indices=(0,)), 26, 'opset=26 .*, only 18; omit it for 20'),
    ],
    ids=['onnxscript', 'opset'],
)
def test_errors_of_onnx_libraries_are_export_errors(tmp_path, capfd, model, opset, message):
    with pytest.raises(ExportError, match=message):
        export_model(model, tmp_path / 'x.onnx', size=32, opset=opset)
    assert not list(tmp_path.iterdir())
    assert 'Traceback' not in capfd.readouterr().err


@pytest.mark.parametrize(
    ('path', 'options', 'error', 'message'),
    [
        ('no folder/x.ts', {}, ValueError, 'create it first'),
        ('x.ts', {'size': 0}, ValueError, 'size'),
        ('x.ts', {'batch': 0}, ValueError, 'batch'),
        ('x.ts', {'half': 'yes'}, TypeError, 'half'),
        ('x.ts', {'opset': 20}, ValueError, 'opset'),
        ('x.ts', {'half': True, 'normalization': 'satlas-rgb'}, ValueError, 'which float16 cannot represent'),
    ],
)
def test_bad_arguments(tmp_path, path, options, error, message):
    with pytest.raises(error, match=message):
        export_model(build(), tmp_path / path, **options)
    assert not list(tmp_path.iterdir())


def test_bad_models(tmp_path):
    with pytest.raises(ValueError, match='a SwinBackbone, got a Linear'):
        export_model(nn.Linear(3, 3), tmp_path / 'x.ts')
    with pytest.raises(TypeError, match=r'must be a torch\.nn\.Module'):
        export_model('swin_t', tmp_path / 'x.ts')


def test_the_command(tmp_path, capsys):
    checkpoint, path = tmp_path / 'tiny.pth', tmp_path / 'my model.ts'
    small = SwinBackbone(
        embed_dims=16,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 4, 8),
        window_size=4,
    )
    torch.save({'model': small.state_dict()}, checkpoint)
    assert main(['export', str(checkpoint), '--out', str(path), '--size', '40', '64']) == 0
    assert path.is_file()
    assert capsys.readouterr().out.count('of the backbone') == 3
    assert main(['export', str(checkpoint), '--out', str(path)]) == 2
    assert 'exists already; force=True (--force) replaces it' in capsys.readouterr().err
    assert main(['export', '--out', str(tmp_path / 'x.txt')]) == 2
    assert '.onnx' in capsys.readouterr().err


@pytest.mark.slow
@needs('onnxscript')
@needs_onnx
@pytest.mark.parametrize(
    'free',
    [
        {'dynamic_shapes': [{0: torch.export.Dim('batch', min=1, max=128)}]},
        {'dynamic_axes': {'input': {0: 'batch'}}},
    ],
    ids=['dynamic_shapes', 'dynamic_axes'],
)
def test_torchs_own_exporter_with_a_free_batch(tmp_path, free):
    """Users call ``torch.onnx.export`` themselves; a batch that the tracing fixes fails in ONNX Runtime only."""
    import onnxruntime

    model = randomize(SwinBackbone(**TINY)).eval()
    file = str(tmp_path / 'swin.onnx')
    torch.onnx.export(model, (torch.randn(4, 3, 40, 56),), file, input_names=['input'], dynamo=True, **free)
    session = onnxruntime.InferenceSession(file)
    for batch in (1, 3, 8):
        image = torch.randn(batch, 3, 40, 56)
        with torch.no_grad():
            expected = model(image)
        for found, one in zip(session.run(None, {'input': image.numpy()}), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(found), one, rtol=1e-4, atol=1e-4)
