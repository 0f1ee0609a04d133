"""Images in, feature pyramids out: reading, regions, tiles, batches, folders of images, storage."""
