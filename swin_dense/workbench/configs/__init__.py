"""Prepare configs of mmdet and mmsegmentation: own data, classes, settings, one file; check them and their data."""
