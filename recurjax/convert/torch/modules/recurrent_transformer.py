"""The Recurrent Transformer: layers that attend to pairs of their own outputs."""

from layers import Config, Layers
from recurrent_block import RecurrentBlock


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return Layers(RecurrentBlock(stack) for _ in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["position"]
