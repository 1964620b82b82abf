"""The gated linear recurrence, over full rows or restarted in chunks."""

from pallas_kernels.gated_scan.api import (
    GatedScanOutputs,
    QueriedScanOutputs,
    gated_scan,
    queried_scan,
)
from pallas_kernels.gated_scan.call import BlockSizes, GateLogits, gate_of
from pallas_kernels.gated_scan.queries import add_at_ends, ends_of, key_logits

__all__ = [
    "BlockSizes",
    "GateLogits",
    "QueriedScanOutputs",
    "GatedScanOutputs",
    "add_at_ends",
    "ends_of",
    "gate_of",
    "gated_scan",
    "key_logits",
    "queried_scan",
]
