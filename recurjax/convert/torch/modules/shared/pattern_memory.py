"""A pattern of mixers with a memory: x <- x + gamma m at the input of every layer."""

from latent_memory import MemoryLayers, factor
from layers import Config, State, Tokens
from torch import Tensor, nn


class PatternWithMemory(MemoryLayers):
    """The layers of a pattern, each with a factor of the memory."""

    def __init__(self, stack: Config, layers: nn.ModuleList):
        super().__init__(stack)
        for number, layer in enumerate(layers):
            layer.memory_scale = factor(True)
            self.add_module(str(number), layer)

    def run(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None,
        states: list[State] | None,
    ) -> list[Tensor]:
        """Makes one pass and returns x after each layer."""
        outputs = []
        for number in range(self.stack["layers"]):
            layer = self.get_submodule(str(number))
            state = None if states is None else states[number]
            x = layer(
                x if memory is None else x + layer.memory_scale * memory, tokens, state
            )
            outputs.append(x)
        return outputs
