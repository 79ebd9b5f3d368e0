"""Trained models as folders that other programs read: plain weights, Hugging Face, timm; with a model card."""
