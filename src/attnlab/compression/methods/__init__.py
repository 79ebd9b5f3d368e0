"""Ways to compress a model: one file each, found by its file in conf/compress."""
