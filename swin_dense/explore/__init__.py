"""The interactive page of `swin-dense explore`: one HTML file that shows how a Swin processes a photograph."""
