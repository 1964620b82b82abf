"""The interpreter that has PyTorch, for tests marked `torch`.

`RECURJAX_TORCH_PYTHON` names it, with the packages that the marker's words name beside
torch; without the variable it is the one that runs the tests.
"""

import os
import subprocess
import sys
from functools import cache

PYTHON = os.environ.get("RECURJAX_TORCH_PYTHON") or sys.executable

_ASKS = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""


@cache
def reason_to_skip(*packages: str) -> str | None:
    """Returns what `PYTHON` lacks of torch and these packages, or None."""
    asked = subprocess.run(
        [PYTHON, "-c", _ASKS, "torch", *packages],
        capture_output=True,
        text=True,
        check=True,
    )
    if missing := asked.stdout.split():
        return (
            f"{', '.join(missing)} not installed in {PYTHON}; see RECURJAX_TORCH_PYTHON"
        )
    return None
