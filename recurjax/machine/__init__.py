"""The process and its machine: devices, their figures, peers, compiled programs."""
