"""Small models that between them turn every switch of the variant."""

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import LearnedPositions, Rope
from recurjax.model import ModelConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig

LENGTH, VOCABULARY = 13, 17


def small(**changes) -> ModelConfig:
    """Two layers of width 8 with the paper's switches, unless changed."""
    base = {
        "layers": 2,
        "width": 8,
        "heads": 4,
        "key_heads": 4,
        "head_width": 4,
        "mlp": MlpConfig(width=12),
        "tile": 4 if changes.get("schedule") != "naive" else None,
    }
    stack = RecurrentTransformerConfig(**(base | changes))
    return ModelConfig(vocabulary=VOCABULARY, stack=stack)


SWITCHES = {
    "the_paper": small(),
    "grouped_rope_layer_norm_biases_wavefront": small(
        key_heads=2,
        position=Rope(base=100.0),
        norm=NormConfig(kind="layer", bias=True, eps=1e-5),
        qk_norm=NormConfig(kind="layer", bias=True, eps=1e-5),
        mlp=MlpConfig(kind="swiglu", width=12, bias=True),
        qkv_bias=True,
        out_bias=True,
        schedule="wavefront",
    ),
    "learned_positions_blocks_of_three": small(
        position=LearnedPositions(length=LENGTH),
        qk_norm=None,
        block=3,
        tile=6,
        residual_scale="one",
    ),
    "ablation_norm_free_prefix": small(
        position=None,
        norm=NormConfig(one_plus=True),
        normed_persistent=False,
        schedule="prefix",
    ),
}
