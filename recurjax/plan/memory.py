"""Bytes of one device's memory that a program needs, by what they hold."""

import math
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
      parameters: of the model.
      optimizer: moments, counters, past losses; 0 where nothing is trained.
      caches: of generation, given or made.
      data: tokens and other arguments.
      results: arrays that are returned and share no buffer with an argument.
      temporaries: activations, gradients and work space at their peak, as the compiler
        packs them.
      code: of the program itself.
    """

    parameters: int
    optimizer: int
    caches: int
    data: int
    results: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """What the device must hold while the program runs."""
        return (
            self.parameters
            + self.optimizer
            + self.caches
            + self.data
            + self.results
            + self.temporaries
            + self.code
        )


def read_memory(compiled: Any, parts: dict[str, Any], *, made_caches: bool) -> Memory:
    """Reads the compiler's analysis.

    Args:
      compiled: the program.
      parts: its arguments by what they are, see `Program.parts`.
      made_caches: what it returns is a cache (prefill).
    """
    analysis = compiled.memory_analysis()
    sizes = {name: device_bytes(tree) for name, tree in parts.items()}
    known = sum(sizes.values())
    # Padding of tiles, and arguments that no part names.
    rest = max(analysis.argument_size_in_bytes - known, 0)
    # A donated argument's buffer is used again for a result: counted once, above.
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Memory(
        parameters=sizes.get("parameters", 0),
        optimizer=sizes.get("optimizer", 0),
        caches=sizes.get("caches", 0) + (results if made_caches else 0),
        data=sizes.get("data", 0) + rest,
        results=0 if made_caches else max(results, 0),
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def device_bytes(tree: Any) -> int:
    """Sums the bytes that the leaves of a tree take on one device."""
    return sum(
        # A leaf that is replicated has its whole shape on every device.
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
