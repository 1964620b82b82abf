"""The TPU path: Pallas kernels lowered by Mosaic; door: `backend`."""
