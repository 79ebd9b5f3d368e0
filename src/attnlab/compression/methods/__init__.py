"""Ways to compress a model: one file each, discovered by its file in conf/compress."""
