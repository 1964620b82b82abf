"""Mamba's selective state space recurrence."""

from pallas_kernels.selective_scan.api import Scanned, selective_scan

__all__ = ["Scanned", "selective_scan"]
