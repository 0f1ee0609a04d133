"""Run the command line with a tiny backbone in a separate program that prints the name of each finished image."""

import contextlib
import sys

if __name__ == '__main__':
    sys.modules['mmengine'] = None  # otherwise swin_dense imports it, which takes as long as the import of torch

    import torch

    from swin_dense.__main__ import main
    from swin_dense.commands import _backbone
    from swin_dense.features import extraction
    from tests.conftest import tiny

    really_extract = extraction.Extraction.steps

    def extract_and_print(*args):
        with contextlib.closing(really_extract(*args)) as steps:
            for step in steps:
                print(step.item.name, flush=True)  # its features are stored
                yield step

    torch.set_num_threads(1)
    toy = tiny()
    _backbone.build_backbone = lambda args: toy
    extraction.Extraction.steps = extract_and_print
    sys.exit(main(['features', *sys.argv[1:]]))
