"""Softmax attention: of arrays, in blocks, over a cache, and as a layer of a block."""

from recurjax.layers.attention.blocked import Past, attend_in_window
from recurjax.layers.attention.heads import (
    keys_for_queries,
    merge,
    project,
    project_flat,
)
from recurjax.layers.attention.implementation import AttentionImplementation
from recurjax.layers.attention.key_value_cache import (
    KeyValueCache,
    attend_to_cache,
    check_room,
    dropped_slots,
    empty_key_value_cache,
    read_layer,
    slot_positions,
    slots_for,
    write_layer,
)
from recurjax.layers.attention.self_attention import (
    AttentionConfig,
    KeysValues,
    SelfAttention,
)
from recurjax.layers.attention.softmax import attend, visible_by_position

__all__ = [
    "AttentionConfig",
    "AttentionImplementation",
    "KeyValueCache",
    "KeysValues",
    "Past",
    "SelfAttention",
    "attend",
    "attend_in_window",
    "attend_to_cache",
    "check_room",
    "empty_key_value_cache",
    "keys_for_queries",
    "merge",
    "project",
    "project_flat",
    "dropped_slots",
    "read_layer",
    "slot_positions",
    "slots_for",
    "visible_by_position",
    "write_layer",
]
