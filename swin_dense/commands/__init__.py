"""The subcommands of ``swin-dense``, one file each: arguments in, the room that does the work, a few lines out.

A new file here is a new subcommand of that name. It has a docstring, whose first line the overview prints and all of which
``--help`` prints; ``add_arguments(parser)``; and ``run(args)``, which returns 0 when all is done and 1 when some of it failed.
Wrong usage raises ValueError, TypeError, OSError or ImportError with one clear line: ``swin-dense`` prints it and exits with 2.
Files with a leading underscore are shared by several.
"""
