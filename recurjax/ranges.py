"""Range checks of config fields, one sentence each; NaN lies in no range."""

import math
from typing import Any

from recurjax.errors import UserError


def require_range(
    config: Any,
    *names: str,
    least: float | int = -math.inf,
    most: float | int = math.inf,
    above: float | int = -math.inf,
    below: float | int = math.inf,
) -> None:
    """Checks that fields are finite with least <= x <= most and above < x < below.

    A field that is None is left alone: it switches something off.

    Raises:
      UserError: naming the class, the first field outside and its value.
    """
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        inside = least <= value <= most and above < value < below
        if not (inside and math.isfinite(value)):
            bounds = [
                f">= {least:g}" if least > -math.inf else "",
                f"> {above:g}" if above > -math.inf else "",
                f"<= {most:g}" if most < math.inf else "",
                f"< {below:g}" if below < math.inf else "",
            ]
            wish = " and ".join(bound for bound in bounds if bound) or "finite"
            raise UserError(
                f"{type(config).__name__}: {name} must be {wish}, got {value}"
            )
