"""Losses: cross-entropy, and divergence from other predictions."""
