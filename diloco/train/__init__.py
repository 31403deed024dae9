"""The training loop and what belongs to it: evaluation, checkpoints, metrics, plots."""
