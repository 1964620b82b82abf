"""The authors' tiled layer, from a checkout of their code; `torch_block.py` calls it.

The checkout is on the module path. It is no copy of anything of theirs: the layer is
made by their class, from their configuration, with our weights put in.
"""

import torch  # pyright: ignore[reportMissingImports]
from olmo.config import (  # pyright: ignore[reportMissingImports]
    ActivationType,
    BlockType,
    LayerNormType,
    ModelConfig,
)
from olmo.model import (  # pyright: ignore[reportMissingImports]
    BufferCache,
    OLMoRecurrentBlockTiled,
    alibi_attention_bias,
)


def peer(arrays: dict, heads: int) -> tuple:
    """Returns what is timed, for `recurjax/bench/torch_side.py`."""
    x, z = arrays.pop("x"), arrays.pop("z")
    return Layer(arrays, heads, x.shape[1]), x, z, lambda z: z.square().sum(), {}


class Layer(torch.nn.Module):
    """Their layer of one input, [B, T, D] to [B, T, D]."""

    def __init__(self, weights: dict, heads: int, length: int):
        """Takes the weights by their paths in recurjax."""
        super().__init__()
        width, inner = weights["mlp.w_up"].shape
        config = ModelConfig(
            d_model=width,
            n_heads=heads,
            n_kv_heads=heads,
            mlp_hidden_size=inner,
            n_layers=1,
            max_sequence_length=length,
            alibi=True,
            activation_type=ActivationType.gelu,
            block_type=BlockType.recurrent,
            layer_norm_type=LayerNormType.rms,
            layer_norm_eps=1e-6,
            attention_layer_norm=True,
            include_bias=False,
            bias_for_layer_norm=False,
            attention_dropout=0.0,
            residual_dropout=0.0,
            # As their configurations have it: MLPs recomputed in four parts.
            bwd_mlp_chunks=4,
            init_device="cpu",
        )
        self.block = OLMoRecurrentBlockTiled(0, config, BufferCache())
        flat = lambda name: weights[name].reshape(width, -1).T  # noqa: E731
        theirs = {
            "q_proj": flat("attention.w_q"),
            "kv_proj": torch.cat([flat("attention.w_k"), flat("attention.w_v")]),
            "attn_out": weights["attention.w_out"].reshape(-1, width).T,
            "ff_proj": weights["mlp.w_up"].T,
            "ff_out": weights["mlp.w_down"].T,
            "attn_norm": weights["attention_norm.scale"],
            "ff_norm": weights["mlp_norm.scale"],
            "q_norm": weights["attention.q_norm.scale"],
            "k_norm": weights["attention.k_norm.scale"],
        }
        for name, weight in theirs.items():
            target = getattr(self.block, name).weight
            target.data.copy_(weight.reshape(target.shape))
        self.bias = alibi_attention_bias(length, config, torch.device("cpu"))

    def forward(self, x):
        """Runs all positions."""
        return self.block(x, attention_bias=self.bias)[0]
