"""What generating cost, compilation apart."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Timing:
    """Seconds and tokens over all rows; a row's first new token comes from the prefill.

    Attributes:
      compile_seconds: near 0 when the same shapes were run before.
      decode_seconds: of an engine, which reads and decodes in turns, both together.
    """

    rows: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens read a second."""
        return (
            self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        )

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens made a second after each row's first; 0 when there were none."""
        # A row's first token was made by the prefill, in its time.
        made = self.new_tokens - self.rows
        return made / self.decode_seconds if self.decode_seconds else 0.0

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time that the body takes to `<phase>_seconds`."""
        start = time.perf_counter()
        # A body that raises adds nothing: its time would be no speed of anything.
        yield
        name = f"{phase}_seconds"
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)
