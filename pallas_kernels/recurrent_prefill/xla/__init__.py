"""The XLA path: every switch, every platform, all three schedules; door: `backend`."""
