"""Lets tools that still run ``setup.py`` work; everything about the package stands in pyproject.toml."""

from setuptools import setup

setup()
