"""Mamba's selective state space recurrence."""

from pallas_kernels.selective_scan.api import Scanned, selective_scan
from pallas_kernels.selective_scan.block_sizes import BlockSizes

__all__ = ["BlockSizes", "Scanned", "selective_scan"]
