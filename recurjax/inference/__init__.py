"""Text from a model: sampling, the compiled decode loop, `generate`."""
