"""Hugging Face's config.json as a ModelConfig: Llama, Gemma 1, GPT-NeoX, Qwen2.

Keys are those of transformers 5 (`rope_parameters`) and of older versions
(`rope_theta`, `rotary_pct`, `rotary_emb_base`). What is not understood is an error.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from recurjax.convert.hugging_face.keys import Keys
from recurjax.errors import UserError
from recurjax.layers.attention import AttentionConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.layers.position import Rope
from recurjax.model import ModelConfig
from recurjax.variants.transformer import TransformerConfig

Architecture = Literal["llama", "gemma", "gpt_neox", "qwen2"]


class HfModel(NamedTuple):
    """What a config.json says.

    Attributes:
      architecture: its `model_type`.
      config: the model.
      length: `max_position_embeddings`, the longest sequence it was trained on.
      read_over: keys of trainers and older files that do not change the model.
    """

    architecture: Architecture
    config: ModelConfig
    length: int
    read_over: tuple[str, ...] = ()


def model_from_keys(
    values: dict[str, Any], *, where: str, ignored: Collection[str] = ()
) -> HfModel:
    """Reads the contents of a config.json.

    Args:
      values: the contents.
      where: what to call the file in messages.
      ignored: keys that are left out, on the user's word.

    Raises:
      UserError: another architecture, or keys that are not understood; all are listed.
    """
    architecture: Any = values.get("model_type")
    if architecture not in list(_READERS):  # a list compares also what has no hash
        raise UserError(
            f"{where}: model_type {architecture!r} is not supported: known are "
            f"{', '.join(_READERS)}"
        )
    # Keys are taken as they are understood; what is left at the end is an error.
    keys = Keys(values, where=where, ignored=ignored)
    keys.any("model_type")
    length = keys.size("max_position_embeddings", _LENGTHS[architecture])
    try:
        config = _READERS[architecture](keys)
    except UserError:
        raise
    except ValueError as error:  # sizes that our configs refuse, say why with the rest
        keys.wrong(str(error))
        config = None
    keys.finish()
    assert config is not None
    return HfModel(architecture, config, length, tuple(keys.read_over))


# Llama's rope in halves, as ours; the interleaved one is another function.
def _llama(keys: Keys) -> ModelConfig:
    keys.only("rope_interleaved", False)
    bias = keys.flag("attention_bias", False)
    return _gated(
        keys,
        kind=keys.word("hidden_act", {"silu": "swiglu"}, "silu"),
        norm=NormConfig(eps=keys.number("rms_norm_eps", 1e-6)),
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp_bias=keys.flag("mlp_bias", False),
        tied=keys.flag("tie_word_embeddings", False),
    )


def _gemma(keys: Keys) -> ModelConfig:
    keys.only("attention_bias", False)
    keys.only("use_bidirectional_attention", None, False)
    # Old files say "gelu" and mean its tanh form: transformers never ran the other.
    tanh = {"gelu": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh"}
    keys.word("hidden_activation", tanh, "gelu_pytorch_tanh")
    norm = NormConfig(eps=keys.number("rms_norm_eps", 1e-6), one_plus=True)
    return _gated(
        keys,
        kind=keys.word("hidden_act", tanh, "gelu_pytorch_tanh"),
        norm=norm,
        attention={},
        tied=keys.flag("tie_word_embeddings", True),
        embedding_scale="sqrt_width",
        head_width=256,
        key_heads=16,
    )


def _qwen2(keys: Keys) -> ModelConfig:
    # Qwen2 names its windows by layer; ours repeat a pattern.
    keys.only("use_mrope", False)
    layers = keys.any("num_hidden_layers")
    windows = _windows(keys, layers if isinstance(layers, int) else 1)
    return _gated(
        keys,
        kind=keys.word("hidden_act", {"silu": "swiglu"}, "silu"),
        norm=NormConfig(eps=keys.number("rms_norm_eps", 1e-6)),
        attention={"qkv_bias": True},
        tied=keys.flag("tie_word_embeddings", False),
        windows=windows,
        layers=layers,
        key_heads=32,
    )


def _gated(
    keys: Keys,
    *,
    kind: Any,
    norm: NormConfig,
    attention: dict[str, Any],
    tied: bool,
    mlp_bias: bool = False,
    embedding_scale: Any = "one",
    head_width: int | None = None,
    windows: tuple[int | None, ...] = (None,),
    layers: int | None = None,
    key_heads: int | None = None,
) -> ModelConfig:
    """Reads what Llama and its relatives share: RMSNorm, a gated MLP, full RoPE."""
    width = keys.size("hidden_size")
    # Where the key is missing, heads have the width's share.
    heads = keys.size("num_attention_heads")
    # Null stands for as many as query heads, a missing key for the class's own number;
    # where that does not fit, transformers has no such model.
    if keys.has("num_key_value_heads") or key_heads is None or heads % key_heads:
        key_heads = heads
    return ModelConfig(
        vocabulary=keys.size("vocab_size"),
        tied_head=tied,
        embedding_scale=embedding_scale,
        final_norm=norm,
        stack=TransformerConfig(
            layers=keys.size("num_hidden_layers", layers),
            width=width,
            norm=norm,
            windows=windows,
            mlp=MlpConfig(
                kind=kind, width=keys.size("intermediate_size"), bias=mlp_bias
            ),
            attention=AttentionConfig(
                heads=heads,
                key_heads=keys.size("num_key_value_heads", key_heads),
                head_width=keys.size("head_dim", head_width or max(width // heads, 1)),
                position=_rope(keys),
                **attention,
            ),
        ),
    )


def _gpt_neox(keys: Keys) -> ModelConfig:
    width = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    norm = NormConfig(
        kind="layer", eps=keys.number("layer_norm_eps", 1e-5), scale=True, bias=True
    )
    bias = keys.flag("attention_bias", True)
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    kinds = {"gelu": "gelu", **dict.fromkeys(tanh, "gelu_tanh")}
    return ModelConfig(
        vocabulary=keys.size("vocab_size"),
        tied_head=keys.flag("tie_word_embeddings", False),
        final_norm=norm,
        stack=TransformerConfig(
            layers=keys.size("num_hidden_layers"),
            width=width,
            norm=norm,
            parallel_residual=keys.flag("use_parallel_residual", True),
            mlp=MlpConfig(
                kind=keys.word("hidden_act", kinds, "gelu"),
                width=keys.size("intermediate_size"),
                bias=True,
            ),
            attention=AttentionConfig(
                heads=heads,
                key_heads=heads,
                head_width=max(width // heads, 1),
                # The rotated share is a quarter where nothing says otherwise.
                position=_rope(keys, fraction=0.25),
                qkv_bias=bias,
                out_bias=bias,
            ),
        ),
    )


def _rope(keys: Keys, fraction: float = 1.0) -> Rope:
    """Reads base and rotated share from wherever a version of transformers put them."""
    # Versions of transformers have these under three names; the newest wins.
    base = keys.number("rotary_emb_base", 10000.0)
    base = keys.number("rope_theta", base)
    fraction = keys.number("rotary_pct", fraction)
    fraction = keys.number("partial_rotary_factor", fraction)
    scaling = keys.any("rope_scaling")
    if scaling not in (None, {"rope_type": "default"}, {"type": "default"}):
        keys.wrong(f"rope_scaling {scaling!r} is not supported, only None")
    new = keys.any("rope_parameters")
    if isinstance(new, dict):
        inner = Keys(new, where="rope_parameters")
        inner.only("rope_type", "default")
        inner.only("type", "default")
        base = inner.number("rope_theta", base)
        fraction = inner.number("partial_rotary_factor", fraction)
        try:
            inner.finish()
        except UserError as error:
            keys.wrong(str(error))
    elif new is not None:
        keys.wrong(f"rope_parameters must be an object, got {new!r}")
    return Rope(base=base, fraction=fraction)


def _windows(keys: Keys, layers: int) -> tuple[int | None, ...]:
    """Reads which layers of Qwen2 see a window: theirs counts the token itself."""
    # Absent keys have the defaults of transformers' class; null switches windows off.
    sliding = keys.any("sliding_window") if keys.has("sliding_window") else 4096
    first = keys.any("max_window_layers") if keys.has("max_window_layers") else 28
    used = keys.flag("use_sliding_window", False)
    kinds = keys.any("layer_types")
    if kinds is None:
        # Without a list of kinds the layers from `max_window_layers` on slide, if at
        # all.
        start = first if isinstance(first, int) and used and sliding else layers
        kinds = [
            "sliding_attention" if layer >= start else "full_attention"
            for layer in range(layers)
        ]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        keys.wrong(f"layer_types {kinds!r} is not supported (known: {known})")
        return (None,)
    if len(kinds) != layers:
        keys.wrong(f"layer_types has {len(kinds)} entries for {layers} layers")
        return (None,)
    if "sliding_attention" not in kinds:
        return (None,)
    if not isinstance(sliding, int) or sliding < 1:
        keys.wrong(f"sliding_window must be a positive number, got {sliding!r}")
        return (None,)
    # Theirs counts the token itself, ours the tokens before it.
    windows = [sliding - 1 if kind == known[1] else None for kind in kinds]
    # The shortest pattern that repeats into the list: layers of one place are stacked.
    period = next(
        p
        for p in range(1, layers + 1)
        if layers % p == 0 and windows == windows[:p] * (layers // p)
    )
    return tuple(windows[:period])


# Of transformers' classes, where max_position_embeddings is missing.
_LENGTHS = {"llama": 2048, "gemma": 8192, "gpt_neox": 2048, "qwen2": 32768}
_READERS: dict[Any, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "gemma": _gemma,
    "gpt_neox": _gpt_neox,
    "qwen2": _qwen2,
}
