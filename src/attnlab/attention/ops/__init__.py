"""What runs on the accelerator, or in its stead."""
