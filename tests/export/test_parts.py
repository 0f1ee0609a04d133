"""The parts of an export one by one, without a whole backbone: what is traced, written, compared and refused."""

import logging
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from torch import nn

from swin_dense import export_model
from swin_dense.export import Exported, ExportError, export, formats, verify
from swin_dense.export.pooling import RecordedPool, replace_adaptive_pools
from swin_dense.images.normalization import Normalization
from swin_dense.utils import packages
from tests.conftest import assert_near
from tests.export.test_export import Pooled, build


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """Return a function that exports a model without a writer, and returns the arguments for a writer."""
    given = []

    def write(model, interface, opset, path):
        given.append((model, interface))
        path.touch()
        return 7

    monkeypatch.setitem(formats.FORMATS, '.ts', write)

    def run(model, **options):
        export_model(model, tmp_path / 'x.ts', check=False, **options)
        return given[-1]

    return run


@pytest.mark.parametrize(
    ('options', 'free', 'shape'),
    [
        ({}, {0: 'batch', 2: 'height', 3: 'width'}, (2, 3, 224, 224)),
        ({'dynamic': False, 'size': (20, 31)}, {}, (1, 3, 20, 31)),
        ({'dynamic': False, 'size': 20, 'batch': 3}, {}, (3, 3, 20, 20)),
        ({'dynamic': False, 'size': 20, 'batch': None}, {0: 'batch'}, (2, 3, 20, 20)),
    ],
)
def test_the_example_has_the_size_and_the_batch(traced, options, free, shape):
    _, interface = traced(build(), **options)
    assert interface.free == (free,)
    assert interface.example[0].shape == shape
    assert interface.example[0].dtype == torch.float32


def test_a_copy_in_evaluation_mode_is_traced(traced):
    model = build(out_indices=(1,)).train()
    recorded, _ = traced(Pooled(model))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not recorded.training
    assert not any(parameter.requires_grad for parameter in recorded.parameters())
    assert {type(pool) for pool in recorded.pools} == {RecordedPool}


def test_half_precision_is_that_of_the_copy(traced):
    model = build()
    recorded, interface = traced(model, half=True, normalization=Normalization(0.5, 0.25))
    assert interface.example[0].dtype == torch.float16
    assert {parameter.dtype for parameter in recorded.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_file_that_normalises_takes_all_bands_up_to_the_last_one_chosen(traced):
    recorded, interface = traced(build(), normalization=Normalization(bands=(4, 0, 2)))
    assert isinstance(recorded, export.Normalized)
    assert interface.example[0].shape == (2, 5, 224, 224)
    recorded, interface = traced(build(), normalization=Normalization(scale=200))
    assert interface.example[0].shape == (2, 3, 224, 224)
    recorded, _ = traced(build())
    assert not isinstance(recorded, export.Normalized)


class Kept(nn.Module):
    """A model that returns its images."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, img):
        return img


@pytest.mark.parametrize('clamp', [True, False])
def test_stored_values_are_normalised(clamp):
    how = Normalization(
        mean=(0.1, 0.2),
        std=(0.5, 0.25),
        scale=(10.0, 20.0),
        bands=(2, 0),
        clamp=clamp,
    )
    img = torch.tensor([3.0, 99.0, 7.0]).view(1, 3, 1, 1)
    found = export.Normalized(Kept(), how, build(in_channels=2))(img)
    expected = [(7 / 10 - 0.1) / 0.5, (3 / 20 - 0.2) / 0.25]
    if clamp:
        expected = [1.0, 0.0]
    assert found.flatten().tolist() == pytest.approx(expected)


def test_without_a_scale_stored_values_have_8_bits():
    model = export.Normalized(
        Kept(),
        Normalization(mean=0.0, std=1.0),
        build(),
    )
    found = model(torch.full((1, 3, 1, 1), 51.0))
    assert found.flatten().tolist() == pytest.approx([0.2] * 3)


def test_a_normalisation_of_other_channels_is_refused():
    with pytest.raises(ValueError, match='4 channels'):
        export.Normalized(Kept(), Normalization(), build(in_channels=4))


def test_the_file_is_compared_at_sizes_that_differ_from_the_trace():
    shape = torch.Size((2, 3, 20, 31))
    of_any_size = export._shapes_to_check(shape, {0: 'batch', 2: 'height', 3: 'width'})
    assert of_any_size == [(1, 3, 25, 18), (3, 3, 7, 32), (2, 3, 33, 20)]
    of_any_batch = export._shapes_to_check(shape, {0: 'batch'})
    assert [batch for batch, *_ in of_any_batch] == [1, 2, 3]
    assert {sizes[1:] for sizes in of_any_batch} == {(3, 20, 31)}
    assert export._shapes_to_check(shape, {}) == [shape]


def compare(model, run):
    return export._error(
        model,
        torch.float32,
        run,
        (1, 3, 4, 5),
    )


class Twice(Kept):
    def forward(self, img):
        return img, [2 * img]


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (lambda a, b: [a, b], 0.0),
        (lambda a, b: [a, b + abs(b).max() / 10], 0.1),
        (lambda a, b: [a - abs(a).max() / 5, b], 0.2),
        (lambda a, b: [a, b[:, :1]], np.inf),
        (lambda a, b: [a.astype(np.float64), b], np.inf),
        (lambda a, b: [a], np.inf),
        (lambda a, b: [a * np.nan, b], np.nan),
        (lambda a, b: [a, b * np.nan], np.nan),
    ],
)
def test_the_error_is_the_largest_of_any_output_relative_to_its_largest_value(change, expected):
    def run(feed):
        return change(feed['img'], 2 * feed['img'])

    error, _ = compare(Twice(), run)
    assert error == pytest.approx(expected, rel=1e-5, nan_ok=True)


class Zeros(Kept):
    def forward(self, img):
        return img, 0 * img


def test_outputs_of_zeros_are_compared_and_counted():
    def run(feed):
        return [feed['img'], 0 * feed['img']]

    assert compare(Zeros(), run) == (0.0, 2)


def test_outputs_are_flattened_in_their_order():
    first, second, third = torch.zeros(3, 1)
    assert formats.outputs_of(first) == [first]
    flat = formats.outputs_of({'a': [second, (third,)], 'b': first})
    for out, expected in zip(flat, (second, third, first), strict=True):
        assert out.data_ptr() == expected.data_ptr()
    with pytest.raises(TypeError, match=r'must return tensors, .*; got int'):
        formats.outputs_of([first, 3])


def test_only_pools_of_a_fixed_size_are_replaced():
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(3),
        nn.AdaptiveAvgPool2d((2, None)),
        nn.AdaptiveMaxPool2d(3),
        nn.AdaptiveAvgPool2d((None, 2)),
    )
    replace_adaptive_pools(model)
    assert (model[0].height, model[0].width) == (3, 3)
    kept = nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d
    assert tuple(type(module) for module in model[1:]) == kept


def test_versions_of_onnx():
    export.check_opset(None, '.ts')
    export.check_opset(18, '.onnx')
    with pytest.raises(ValueError, match='opset must be at least 18, got 17'):
        export.check_opset(17, '.onnx')
    with pytest.raises(ValueError, match=r'only for \.onnx files; omit it for \.pt2'):
        export.check_opset(20, '.pt2')


def test_advice_in_errors(tmp_path):
    model = build(clamp_window=True)
    with pytest.raises(ValueError, match=r'clamp_window=True .*dynamic=False, or .*clamp_window=False'):
        export_model(model, tmp_path / 'x.ts')
    with pytest.raises(ValueError, match=r'call .float\(\) first.* pass half=True for a file in float16'):
        export_model(build().half(), tmp_path / 'x.ts')
    with pytest.raises(ValueError, match=r"suffix of path must be one of .*'\.ts'.*, got '\.txt'"):
        export_model(build(), tmp_path / 'x.txt')


@pytest.mark.parametrize(
    ('check', 'user'),
    [
        (True, 'the check of an .onnx file needs'),
        (False, 'an .onnx file needs'),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, check, user):
    monkeypatch.setattr(packages, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match=f'^{user}'):
        export_model(build(), tmp_path / 'x.onnx', check=check)


@pytest.mark.parametrize(
    ('version', 'options'),
    [
        ('2.10.0', {}),
        ('2.9.0', {'dynamic': False}),
        ('2.9.0', {'dynamic': False, 'batch': None}),
    ],
)
def test_the_oldest_torch_that_writes_a_file(tmp_path, monkeypatch, version, options):
    def stop(*args, **options):
        raise RuntimeError('torch.export was called')

    monkeypatch.setattr(torch, '__version__', version)
    monkeypatch.setattr(torch.export, 'export', stop)
    with pytest.raises(ExportError, match=r'torch.export was called'):
        export_model(build(), tmp_path / 'x.pt2', size=32, **options)


class Comparing:
    """A file in place of one of a runtime, whose errors are given, and what was asked of it."""

    def __init__(self, errors, counts=(1, 1, 1)):
        self.answers = list(zip(errors, counts, strict=False))
        self.shapes = [(index + 1, 3, 4, 4) for index in range(len(errors))]
        self.loaded = []

    def load(self, path, device):
        self.loaded.append(path)
        return self

    def error(self, run, shape):
        assert run is self
        return self.answers[shape[0] - 1]

    def write(self, path, monkeypatch):
        monkeypatch.setattr(verify, 'load', self.load)
        comparison = verify.Comparison(self.shapes, self.error, 0.5, 'off by {error}, at most {limit}')
        return verify.write_verified(path, written, comparison)


def written(path):
    path.write_text('graph')
    return 5


def test_a_file_within_the_limit_is_kept(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, 'swin_dense.export')
    file = Comparing([0.1, 0.5, 0.0])
    exported = file.write(tmp_path / 'x.ts', monkeypatch)
    assert (exported.path, exported.nodes) == (tmp_path / 'x.ts', 5)
    assert list(exported.errors) == file.shapes
    assert list(exported.errors.values()) == [0.1, 0.5, 0.0]
    assert (tmp_path / 'x.ts').read_text() == 'graph'
    assert len(file.loaded) == 1
    steps = [message.split()[0] for message in caplog.messages]
    assert steps == ['tracing', 'comparing', 'comparing', 'comparing']


@pytest.mark.parametrize('error', [0.51, float('nan'), float('inf')])
def test_a_file_beyond_the_limit_is_removed(tmp_path, monkeypatch, error):
    with pytest.raises(ExportError, match=rf'wrong on an image \(2, 3, 4, 4\).*off by {error}, at most 0.5'):
        Comparing([0.1, error]).write(tmp_path / 'x.ts', monkeypatch)
    assert not list(tmp_path.iterdir())


def test_a_file_of_which_nothing_was_compared_is_removed(tmp_path, monkeypatch):
    with pytest.raises(ExportError, match=r'could not be compared, .*the model has no outputs'):
        Comparing([0.0, 0.0], counts=(0, 0)).write(tmp_path / 'x.ts', monkeypatch)
    Comparing([0.0, 0.0], counts=(0, 1)).write(tmp_path / 'x.ts', monkeypatch)


def test_without_a_comparison_there_are_no_errors(tmp_path):
    path = tmp_path / 'x.ts'
    exported = verify.write_verified(path, written, None)
    assert exported == Exported(path, 5, {})
    with pytest.raises(FrozenInstanceError):
        exported.nodes = 6


def test_exporters_are_quiet_for_a_while(monkeypatch):
    logger = logging.getLogger('onnxscript')
    monkeypatch.setattr(logger, 'level', logging.INFO)
    with warnings.catch_warnings(record=True) as caught, formats._quiet():
        warnings.warn('for developers of exporters', stacklevel=1)
        assert logger.level == logging.CRITICAL
    assert logger.level == logging.INFO
    assert not caught


class Scored(nn.Module):
    """A model with a second input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, img, score):
        return nn.functional.gelu(self.layer(img)) + score, img * score


INTERFACE = formats.Interface(
    (torch.randn(2, 3, 5, 4), torch.tensor(0.25)),
    ({0: 'batch'}, {}),
    inputs=('img', 'score'),
    outputs=('found', 'scaled'),
    facts={'format': '3'},
)


@pytest.mark.parametrize(('lower', 'ranges'), [(1, {}), (2, {'batch': torch.export.Dim('batch', min=2, max=4)})])
def test_a_program_has_the_ranges_that_it_was_given(tmp_path, lower, ranges):
    interface = replace(INTERFACE, ranges=ranges)
    nodes = formats.write_pt2(
        Scored().eval(),
        interface,
        None,
        tmp_path / 'x.pt2',
    )
    program = torch.export.load(tmp_path / 'x.pt2')
    assert nodes == len(program.graph.nodes)
    (batch,) = program.range_constraints.values()
    assert batch.lower == lower
    assert (batch.upper == 4) is bool(ranges)
    found, _ = program.module()(torch.rand(lower, 3, 5, 4), torch.tensor(0.5))
    assert len(found) == lower


class Summed(Kept):
    """A model that reads the size of its images."""

    def forward(self, img):
        return {'sum': img.sum((2, 3)) / (img.shape[2] * img.shape[3])}


@pytest.mark.parametrize('is_dynamic', [True, False])
def test_torchscript_reads_sizes_only_if_they_differ(tmp_path, monkeypatch, is_dynamic):
    if is_dynamic:
        monkeypatch.setattr(torch, '__version__', '2.1.0')  # it needs no torch.export
    path = tmp_path / 'x.ts'
    img = torch.rand(2, 3, 5, 4)
    free = {0: 'batch', 2: 'height', 3: 'width'} if is_dynamic else {}
    interface = formats.Interface((img,), (free,))
    nodes = formats.write_torchscript(Summed().eval(), interface, None, path)
    graph = torch.jit.load(path).inlined_graph
    kinds = [node.kind() for node in graph.nodes()]
    assert 0 < nodes <= len(kinds)  # a loaded file repeats constants
    assert ('aten::size' in kinds) is is_dynamic
    if is_dynamic:
        img = torch.rand(3, 3, 7, 2)
    (found,) = verify.load(path)({'img': img.numpy()})
    assert_near(found, img.mean((2, 3)).numpy(), 1e-6)


@pytest.fixture(scope='module')
def onnx_file(tmp_path_factory):
    pytest.importorskip('onnxscript')
    onnx = pytest.importorskip('onnx')
    path = tmp_path_factory.mktemp('onnx') / 'x.onnx'
    model = Scored().eval()
    nodes = formats.write_onnx(model, INTERFACE, None, path)
    return model, path, onnx.load(path), nodes


def test_names_and_facts_of_onnx(onnx_file):
    _, _, content, nodes = onnx_file
    assert {entry.key: entry.value for entry in content.metadata_props} == {'format': '3'}
    versions = {entry.domain: entry.version for entry in content.opset_import}
    assert versions[''] == 20
    assert [value.name for value in content.graph.input] == ['img', 'score']
    assert [value.name for value in content.graph.output] == ['found', 'scaled']
    first = content.graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in first] == ['batch', 3, 5, 4]
    assert nodes == len(content.graph.node)


def test_nodes_do_not_say_where_they_come_from(onnx_file):
    content = onnx_file[2]
    keys = {entry.key for node in content.graph.node for entry in node.metadata_props}
    assert 'pkg.torch.onnx.stack_trace' not in keys


def test_weights_have_one_shape(onnx_file):
    """A second one, of the value, would be wrong after a tool has transposed the weight."""
    graph = onnx_file[2].graph
    weights = {weight.name for weight in graph.initializer} - {'score'}
    assert len(weights) >= 2
    for value in graph.value_info:
        assert value.name not in weights or not value.type.tensor_type.HasField('shape')


@pytest.mark.parametrize('batch', [1, 2, 3])
def test_an_input_after_the_first_is_optional(onnx_file, batch):
    pytest.importorskip('onnxruntime')
    model, path, _, _ = onnx_file
    img = torch.randn(batch, 3, 5, 4)
    run = verify.load(path)
    default = run({'img': img.numpy()})
    given = run({'img': img.numpy(), 'score': np.array(0.5, np.float32)})
    for outs, score in ((default, 0.25), (given, 0.5)):
        expected = model(img, torch.tensor(score))
        for ours, theirs in zip(outs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach(), atol=1e-6)


def test_weights_beyond_protobufs_limit_are_refused(onnx_file, tmp_path, monkeypatch):
    assert 2**30 < formats.LARGEST_ONNX < 2**31
    model, _, content, _ = onnx_file
    numbers = sum(int(np.prod(weight.dims)) for weight in content.graph.initializer)
    held = 4 * numbers
    monkeypatch.setattr(formats, 'LARGEST_ONNX', held)
    formats.write_onnx(model, INTERFACE, None, tmp_path / 'x.onnx')
    monkeypatch.setattr(formats, 'LARGEST_ONNX', held - 1)
    with pytest.raises(ValueError, match=f'weights of {held} bytes .*pass half=True'):
        formats.write_onnx(model, INTERFACE, None, tmp_path / 'y.onnx')
    assert [path.name for path in tmp_path.iterdir()] == ['x.onnx']


def test_a_version_that_onnxscript_cannot_write_is_refused(onnx_file, tmp_path, caplog, capfd):
    caplog.set_level(logging.INFO, 'swin_dense.export')
    with pytest.raises(ExportError, match=r'cannot write opset=26 .* omit it for 20'):
        formats.write_onnx(onnx_file[0], INTERFACE, 26, tmp_path / 'x.onnx')
    assert caplog.messages == ['converting the graph to ONNX ...']
    assert not capfd.readouterr().out
