"""What the pipelines share: plan, schedules, optimiser, samplers, seeds, processes, progress, the training run."""
