"""Compiles experiments for hardware that is not present, and reads the results."""
