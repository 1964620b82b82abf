"""Compiling experiments for hardware that is not here, and reading what came out."""
