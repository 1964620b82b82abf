"""Code of both Pallas backends: layouts, backward loop, weights' gradients."""
