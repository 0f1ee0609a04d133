"""Images: their pixels, files, regions and tiles, and their normalization."""
