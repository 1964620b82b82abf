"""What training makes small: cross-entropy, and divergence from other predictions."""
