"""The values of a Hugging Face config under our names: one flat dictionary.

Families differ in how they call these values, which of them a config.json states, and
which are fixed. `model_of` and `values_of` know our configs and no family.
"""

from collections.abc import Sequence
from typing import Any

from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig

Values = dict[str, Any]
"""vocabulary, width, layers, heads, key_heads, head_width, inner, length, position, and
those of `DEFAULTS`."""

DEFAULTS: Values = {
    # Of a layer.
    "activation": "swiglu",
    "eps": 1e-6,
    "norm": "rms",  # or "layer", with biases
    "one_plus": False,
    "norms": "before",
    "parallel": False,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    # Of its attention: None, "head" or "full" norms; the rotation of windowed layers,
    # where it is another one; windows and layers without positions by layer.
    "qk_norm": None,
    "scale": None,
    "attention_cap": None,
    "local_position": None,
    "windows": (None,),
    "positioned": (True,),
    # Of the model.
    "tied": False,
    "embedding_scale": "one",
    "logit_cap": None,
}


def model_of(values: Values) -> ModelConfig:
    """Returns the model that has these values.

    Raises:
      ValueError: our configs refuse one of them.
    """
    v = DEFAULTS | values
    norm = NormConfig(
        kind=v["norm"],
        eps=v["eps"],
        bias=v["norm"] == "layer",
        one_plus=v["one_plus"],
    )
    positions = _positions(v)
    return ModelConfig(
        vocabulary=v["vocabulary"],
        tied_head=v["tied"],
        embedding_scale=v["embedding_scale"],
        logit_soft_cap=v["logit_cap"],
        final_norm=norm,
        stack=TransformerConfig(
            layers=v["layers"],
            width=v["width"],
            norm=norm,
            norms=v["norms"],
            windows=shortest_pattern(v["windows"]),
            positions=positions,
            parallel_residual=v["parallel"],
            mlp=MlpConfig(kind=v["activation"], width=v["inner"], bias=v["mlp_bias"]),
            attention=AttentionConfig(
                heads=v["heads"],
                key_heads=v["key_heads"],
                head_width=v["head_width"],
                position=v["position"],
                qk_norm=None if v["qk_norm"] is None else norm,
                qk_norm_over=v["qk_norm"] or "head",
                qkv_bias=v["qkv_bias"],
                out_bias=v["out_bias"],
                scale=v["scale"],
                soft_cap=v["attention_cap"],
            ),
        ),
    )


def values_of(config: ModelConfig, *, length: int) -> Values:
    """Returns the values of a model, as far as it has them: see `model_of`.

    Args:
      config: config of a model whose stack is a Transformer.
      length: the longest sequence of its training, in tokens.
    """
    stack = config.stack
    assert isinstance(stack, TransformerConfig)
    a = stack.attention
    kinds = [stack.kind_of(layer) for layer in range(stack.layers)]
    windowed = [kind.position for kind in kinds if kind.window is not None]
    position = Rope() if a.position is None else a.position
    return {
        "vocabulary": config.vocabulary,
        "width": stack.width,
        "layers": stack.layers,
        "heads": a.heads,
        "key_heads": a.key_heads,
        "head_width": a.head_width,
        "inner": stack.mlp.width,
        "length": stack.max_length or length,
        "position": position,
        "local_position": next((p for p in windowed if p is not None), position),
        "windows": tuple(kind.window for kind in kinds),
        "positioned": tuple(kind.position is not None for kind in kinds),
        "activation": stack.mlp.kind,
        "eps": stack.norm.eps,
        "parallel": stack.parallel_residual,
        "qkv_bias": a.qkv_bias,
        "out_bias": a.out_bias,
        "mlp_bias": stack.mlp.bias,
        "scale": a.scale,
        "attention_cap": a.soft_cap,
        "tied": config.tied_head,
        "logit_cap": config.logit_soft_cap,
    }


def _positions(v: Values) -> tuple[Any, ...] | None:
    """Returns the pattern of positions; None where all layers have the attention's."""
    count, local = v["layers"], v["local_position"]
    by_layer = []
    for layer in range(count):
        window = v["windows"][layer % len(v["windows"])]
        is_local = local is not None and window is not None
        position = local if is_local else v["position"]
        is_there = v["positioned"][layer % len(v["positioned"])]
        by_layer.append(position if is_there else None)
    if all(position == v["position"] for position in by_layer):
        return None
    return shortest_pattern(by_layer)


def shortest_pattern(by_layer: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the shortest pattern that, tiled, begins with these values.

    Layers of one place in the pattern are stacked, so a short one compiles quickly.
    """
    count = len(by_layer)
    return next(
        tuple(by_layer[:period])
        for period in range(1, count + 1)
        if all(by_layer[n] == by_layer[n % period] for n in range(count))
    )
