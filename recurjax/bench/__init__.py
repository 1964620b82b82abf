"""Timings anyone can repeat: one file of rows a variant."""
