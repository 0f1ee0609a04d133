"""The subcommands of ``swin-dense``, one file each: parse arguments, call another package, print the result.

A new file here is a new subcommand of the same name. It needs a docstring (``swin-dense --help`` prints its first line,
``swin-dense NAME --help`` the whole), ``GROUP``, a key of ``GROUPS`` in ``_main.py``, ``EXTRA`` if it needs the
packages of an extra, ``add_arguments(parser)``, and ``run(args)``, which returns 0 on success and 1 if some inputs
failed. For wrong usage it raises ValueError, TypeError, OSError or ImportError with a message of one line; the exit
status is then 2. Files with a leading underscore contain shared code.
"""
