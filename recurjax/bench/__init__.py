"""Timings anyone can repeat: one file of rows per variant."""
