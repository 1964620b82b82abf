"""The gated linear recurrence, whole or restarted in chunks."""

from pallas_kernels.gated_scan.api import Scanned, gated_scan

__all__ = ["Scanned", "gated_scan"]
