"""The workbench: whole models of mmdet and mmsegmentation, with any backbone.

No other package imports it but the commands and the public names. Recipes, channels of necks and files of Swins are
all that it knows of the backbone; everything else works with any.
"""
