"""What both Pallas backends share: layouts, the backward loop, weights' gradients."""
