"""Small models that loop over RAT's mixers."""

from recurjax.layers.mlp import MlpConfig
from recurjax.layers.norm import NormConfig
from recurjax.model import ModelConfig
from recurjax.variants.rat import (
    AttentionMixerConfig,
    MambaMixerConfig,
    MixerConfig,
    RatConfig,
    RecurrentLayerConfig,
    ReversedRatMixerConfig,
    RnnMixerConfig,
)
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from tests.variants.rat import switches as rat
from tests.variants.rat.switches import HEADS, LENGTH, VOCABULARY, WIDTH, WINDOW

build = rat.build


def small(
    *pattern: MixerConfig,
    layers: int | None = None,
    loops: int = 2,
    mlp: MlpConfig | None = None,
    norm: NormConfig | None = None,
    **options,
) -> ModelConfig:
    """A model of width 8 whose block has every mixer of the pattern once."""
    base = RatConfig(
        layers=loops * len(pattern) if layers is None else layers,
        width=WIDTH,
        pattern=pattern,
        mlp=MlpConfig(width=12) if mlp is None else mlp,
        norm=NormConfig() if norm is None else norm,
    )
    stack = RelaxedRecursiveTransformerConfig(transformer=base, loops=loops, **options)
    return ModelConfig(vocabulary=VOCABULARY, stack=stack, tied_head=True)


RNN = RnnMixerConfig(heads=2, head_width=6, gate_horizon=LENGTH, forget_rank=3)
REVERSED = ReversedRatMixerConfig(
    heads=HEADS, head_width=4, chunk=4, groups=2, gate_horizon=4, output_rank=3
)
MAMBA = MambaMixerConfig(conv=3, state=3, dt_rank=2)
RT = RecurrentLayerConfig(
    heads=HEADS, key_heads=2, head_width=4, block=2, qkv_bias=True, residual_scale="one"
)
FULL = AttentionMixerConfig(attention=WINDOW.attention)

SWITCHES = {
    "rat, untied, rank 3, attention": small(
        *(rat.rat(), FULL),
        rank=3,
        tie_norms=False,
        mlp=MlpConfig(kind="swiglu", width=12, bias=True),
        norm=NormConfig(bias=True, kind="layer"),
    ),
    "rnn, three loops, rank 2": small(RNN, loops=3, rank=2),
    "windows, rat, tied": small(WINDOW, rat.rat(chunk=3, groups=1)),
    "mamba, attention, untied, rank 2": small(MAMBA, FULL, rank=2, tie_norms=False),
    "rt, rat, untied, rank 2": small(RT, rat.rat(), rank=2, tie_norms=False),
    "reversed, sequence, rank 2": small(
        REVERSED, layers=4, sharing="sequence", rank=2, tie_norms=False
    ),
    "rat, cycle_rev": small(rat.rat(), layers=4, sharing="cycle_rev", rank=1),
}
SLOW = frozenset({"rt, rat, untied, rank 2"})
RARE = frozenset(list(SWITCHES)[2:]) - SLOW
