"""Checks of configs and their data before training, testing or writing a config."""
