"""Substitutes for newer parts of torch, tested with the installed torch; other modules use only the substitutes."""

import ast

import torch

from swin_dense.utils import compat
from tests.conftest import ROOT

PACKAGE = ROOT / 'swin_dense'
# Names that torch 2.1 lacks or has in another form.
NEWER = {
    'custom_op', 'is_compiling', 'is_exporting', 'is_autocast_enabled', 'get_autocast_dtype', 'uint16',
    'register_load_state_dict_pre_hook', 'add_safe_globals', 'get_safe_globals', 'clear_safe_globals',
    'safe_globals', 'OutOfMemoryError',
}  # fmt: skip


def newer_names(source):
    """Yield the attributes in NEWER that source code does not take from ``compat``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NEWER:
            owner = ast.unparse(node.value)
            if owner != 'compat' and owner.partition('.')[0] in ('torch', 'self', 'module', 'model'):
                yield f'{owner}.{node.attr}'


def test_newer_names_of_torch_are_taken_from_compat():
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob('*.py')
        if path.name != 'compat.py' and (names := list(newer_names(path.read_text())))
    }
    assert not found
    seen = set(newer_names('@torch.library.custom_op("a")\ndef f(): torch.uint16'))
    assert seen == {'torch.library.custom_op', 'torch.uint16'}


def test_a_plain_operator_uses_the_registered_gradient():
    @compat._Operator
    def double(x, factor):
        return 2 * x * factor

    def save(ctx, inputs, output):
        ctx.factor = inputs[1]

    assert double.register_fake(save) is save
    double.register_autograd(lambda ctx, grad: (7 * grad * ctx.factor, None), setup_context=save)
    x = torch.ones(3, requires_grad=True)
    out = double(x, 5)
    out.sum().backward()
    assert out.tolist() == [10, 10, 10]
    assert x.grad.tolist() == [35, 35, 35]
