"""One peer's training: loop, gradients, inner optimizer, evaluation, checkpoints and reports."""
