"""The workbench: whole models of mmdet and mmsegmentation, with any backbone.

Nothing here knows what a Swin is, and nothing else imports it but the commands and the public names.
"""
