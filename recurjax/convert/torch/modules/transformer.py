"""The Transformer: attention and MLP around a residual stream."""

from layers import Attention, Config, Layers, ResidualBlock, kind_of


class TransformerBlock(ResidualBlock):
    """A layer of the residual stream."""

    def __init__(self, stack: Config, layer: int):
        super().__init__(stack)
        attention, window = kind_of(stack, layer)
        self.attention = Attention(attention, stack["width"], window)


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return Layers(TransformerBlock(stack, layer) for layer in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["attention"]["position"]
