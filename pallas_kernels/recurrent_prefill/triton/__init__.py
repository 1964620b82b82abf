"""The GPU path: Pallas kernels lowered by Triton; door: `backend`."""
