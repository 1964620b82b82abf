"""The gated linear recurrence, whole or restarted in chunks."""

from pallas_kernels.gated_scan.api import Scanned, gated_scan
from pallas_kernels.gated_scan.inputs import GateLogits, gate_of

__all__ = ["GateLogits", "Scanned", "gate_of", "gated_scan"]
