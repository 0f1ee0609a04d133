"""A page, whole in one file, on which people see what a Swin does to a photograph."""
