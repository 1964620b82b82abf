"""Training: objective, optimizer, step, loop, checkpoints, metrics."""
