"""Exact kernels, one folder an op: a reference, XLA, and Pallas for GPU and TPU."""
