"""The subcommands of ``swin-dense``, one file each: arguments in, the package that does the work, a few lines out.

A new file here is a new subcommand of that name. It has a docstring, whose first line the overview prints and
``--help`` all of it; ``add_arguments(parser)``; and ``run(args)``, which returns 0 when all is done and 1 when some
of it failed. Wrong usage raises ValueError, TypeError, OSError or ImportError with one clear line, for which the exit
status is 2. What several files share stands in files with a leading underscore.
"""
