"""The Transformer: pre-norm attention and MLP around a residual stream."""

from layers import Attention, Config, Layers, Mlp, Norm, State, Tokens
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """y = x + s attention(norm(x)), z = y + s mlp(norm'(y)), or both from x."""

    def __init__(self, stack: Config, layer: int):
        super().__init__()
        width, windows = stack["width"], stack["windows"]
        self.parallel = stack["parallel_residual"]
        unscaled = stack["residual_scale"] == "one"
        self.scale = 1.0 if unscaled else stack["layers"] ** -0.5
        self.attention_norm = Norm(stack["norm"], width)
        # Windows repeat over the layers as a pattern does.
        window = windows[layer % len(windows)]
        self.attention = Attention(stack["attention"], width, window)
        self.mlp_norm = Norm(stack["norm"], width)
        self.mlp = Mlp(stack["mlp"], width)

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> Tensor:
        mixed = self.attention(self.attention_norm(x), tokens, state)
        y = x + self.scale * mixed
        # Both branches read x where the residual is parallel; else the MLP reads y.
        source = x if self.parallel else y
        return y + self.scale * self.mlp(self.mlp_norm(source))


def build_layers(stack: Config) -> Layers:
    """Builds all layers, the first one first."""
    return Layers(TransformerBlock(stack, layer) for layer in range(stack["layers"]))


def position_of(stack: Config) -> Config | None:
    """Returns the config of positions; the decoder adds learned ones."""
    return stack["attention"]["position"]
