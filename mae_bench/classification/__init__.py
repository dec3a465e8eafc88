"""Linear probe, fine-tuning and supervised training on class folders; the entry points are in ``run``."""
