"""Mamba's selective state space recurrence."""

from pallas_kernels.selective_scan.api import selective_scan
from pallas_kernels.selective_scan.call import BlockSizes, SelectiveScanOutputs

__all__ = ["BlockSizes", "SelectiveScanOutputs", "selective_scan"]
