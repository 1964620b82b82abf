"""Layers one after another: made once, scanned, and the rows of their caches."""

from recurjax.layers.stack.cache_rows import CacheRows
from recurjax.layers.stack.config_facts import StackFacts
from recurjax.layers.stack.layer_scan import (
    Remat,
    layers_a_turn,
    loops_a_turn,
    rematerialize,
    scan_layers,
)
from recurjax.layers.stack.pattern_stack import (
    PatternCache,
    advanced,
    layer_states,
    make_blocks,
    run_blocks,
    scan_pattern,
)

__all__ = [
    "CacheRows",
    "PatternCache",
    "Remat",
    "StackFacts",
    "advanced",
    "layer_states",
    "layers_a_turn",
    "loops_a_turn",
    "make_blocks",
    "rematerialize",
    "run_blocks",
    "scan_layers",
    "scan_pattern",
]
