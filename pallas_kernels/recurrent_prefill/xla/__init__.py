"""The XLA path: every switch, every platform, all four schedules; door: `backend`."""
