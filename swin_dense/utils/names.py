"""Names of parameters inside the wrappers of PyTorch."""

import re

_WRAPPERS = re.compile(r'\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')


def unwrapped(name: str) -> str:
    """Return a parameter name without the components that wrappers insert, such as those of ``torch.compile``."""
    return _WRAPPERS.sub('', name)
