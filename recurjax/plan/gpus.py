"""What XLA's GPU compiler asks of the device that it compiles for."""

from typing import NamedTuple

from recurjax.machine.devices import HARDWARE


class Gpu(NamedTuple):
    """A GPU as XLA's cost models know it.

    Attributes:
      name: the driver's.
      capability: compute capability, a key of `MULTIPROCESSORS`.
      multiprocessors: how many it has.
      l2_bytes: of its L2 cache.
      clock: GHz at most.
    """

    name: str
    capability: str
    multiprocessors: int
    l2_bytes: int
    clock: float


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor: NVIDIA's table of technical specifications."""

    shared_bytes: int
    shared_bytes_of_block: int
    threads: int
    float32_lanes: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 40 * 2**20, 1.41),
    "l4": Gpu("NVIDIA L4", "8.9", 58, 48 * 2**20, 2.04),
    "l40s": Gpu("NVIDIA L40S", "8.9", 142, 96 * 2**20, 2.52),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", "8.9", 128, 72 * 2**20, 2.52),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "9.0", 132, 50 * 2**20, 1.98),
    "h200": Gpu("NVIDIA H200", "9.0", 132, 50 * 2**20, 1.98),
    "b200": Gpu("NVIDIA B200", "10.0", 148, 132_644_864, 1.965),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", "12.0", 170, 96 * 2**20, 2.407),
}
"""By the names of `HARDWARE`; numbers as in XLA's own descriptions of devices where it
has one (a100, h100, h200, b200), else NVIDIA's."""
MULTIPROCESSORS = {
    "8.0": Multiprocessor(167_936, 166_912, 2048, 64),
    "8.9": Multiprocessor(102_400, 101_376, 1536, 128),
    "9.0": Multiprocessor(233_472, 232_448, 2048, 128),
    "10.0": Multiprocessor(233_472, 232_448, 2048, 128),
    "12.0": Multiprocessor(102_400, 101_376, 1536, 128),
}


def target_config(kind: str) -> str:
    """Returns a GPU as the text of XLA's GpuTargetConfigProto."""
    gpu, hardware = GPUS[kind], HARDWARE[kind]
    core = MULTIPROCESSORS[gpu.capability]
    major, minor = gpu.capability.split(".")
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {core.shared_bytes}
  threads_per_core_limit: {core.threads}
  core_count: {gpu.multiprocessors}
  fpus_per_core: {core.float32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {hardware.memory_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {hardware.memory}
  shared_memory_per_block_optin: {core.shared_bytes_of_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.name}"
"""
