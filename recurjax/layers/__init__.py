"""Layers that at least two variants share."""
