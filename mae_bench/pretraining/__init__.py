"""MAE pre-training: masking, model, reconstructions; the entry points are in ``run``."""
