"""The process and its machine: devices, process group, compiled programs, caches."""
