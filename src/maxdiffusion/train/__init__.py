"""Training: state, step, loop, checkpoints, metrics."""
