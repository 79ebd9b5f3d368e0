"""Export of trained models as folders for other programs: plain weights, Hugging Face, timm; with a model card."""
