"""Where this machine keeps what may be removed at any time."""

import os
import sys
from pathlib import Path

VARIABLE = "RECURJAX_CACHE"


def user_cache() -> Path:
    """Returns the folder of this library below the user's cache folder."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "recurjax"
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "recurjax"


def cache_folder() -> Path | None:
    """Returns `$RECURJAX_CACHE`, by default the user's folder.

    None: the variable is set to nothing, so that nothing is to be kept.
    """
    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    return Path(given).expanduser() if given else user_cache()
