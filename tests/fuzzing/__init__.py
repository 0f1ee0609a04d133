"""Kinds of fuzzed inputs: each has a strategy, and a function that tries one example and returns the outcome.

``tests/test_fuzz.py`` tries examples of each kind; ``tests/images/test_mutations.py`` damages image files. An attempt
returns 'taken' or 'refused'; an exception is a defect. An input is refused if a ``raise`` statement of this package
rejects it, or memory runs out. An error of the same type from Python or a library means that a check is missing.
"""
