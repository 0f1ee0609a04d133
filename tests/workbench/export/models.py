"""The small models that the tests export, by name: 'mask_rcnn on swin', or a name of ``query_models``."""

import torch

from tests.workbench.export import query_models, whole_models

STEPS = 80  # of a training
UNTRAINED = 'untrained '  # first word of the name of a segmentor with random weights
# Of random weights; a MaskFormer of most seeds finds nothing in one of the sizes.
SEEDS = {'maskformer': 7}


def config_of(name, data):
    """Return the config of a model for the demo data set in ``data``."""
    model, _, backbone = name.removeprefix(UNTRAINED).partition(' on ')
    if model in query_models.FILES:
        return query_models.config_of(name, data)
    return whole_models.config_of(model, data, backbone)


def make_weights(name, config, pixels, path):
    """Save weights, trained or random, with which a model finds something in an image (H, W, 3), BGR."""
    is_random = name.startswith(UNTRAINED) or name.partition(' on ')[0] in query_models.FILES
    if is_random:
        model = query_models.random_model(config, pixels, seed=SEEDS.get(name, 2))
        torch.save({'state_dict': model.state_dict(), 'meta': {}}, path)
    else:
        whole_models.train(config, path, STEPS)
