"""Constant folding: replace the parts of a traced graph that depend only on constants by their values."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, cast

from torch import Tensor, fx


def fold_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Return the module with all tensors that do not depend on its input stored as buffers.

    These are the position biases and, with fixed sizes, the index tables and masks of all windows.
    """
    graph = module.graph
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == 'get_attr':
            values[node] = attrgetter(cast('str', node.target))(module)
        elif node.op == 'call_function' and all(source in values for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    computed = [node for node in values if node.op == 'call_function']
    for node in computed:
        value = values[node]
        if isinstance(value, Tensor) and any(user not in values for user in node.users):
            name = f'folded_{node.name}'
            module.register_buffer(name, value.detach().clone())
            with graph.inserting_before(node):
                constant = graph.get_attr(name)
            node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in values)
    for node in reversed(computed):  # nodes without users are checks, which have passed
        if not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)  # a new module, because the old has hooks on its inputs
