"""Folders of this machine for files that may be removed at any time."""

import os
import sys
from pathlib import Path

VARIABLE = "RECURJAX_CACHE"


def user_cache() -> Path | None:
    """Returns the folder of this library below the user's cache folder.

    None: the user has no home, as in a container that runs under any number.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if sys.platform == "darwin":
        folder = "~/Library/Caches"
    try:
        return Path(folder).expanduser() / "recurjax"
    except RuntimeError:
        return None


def cache_folder() -> Path | None:
    """Returns `$RECURJAX_CACHE`, by default the user's folder.

    None: the variable is set to nothing, so that nothing is to be kept, or it is not
    set and the user has no home.
    """
    folder = os.environ.get(VARIABLE)
    if folder == "":
        return None
    return Path(folder).expanduser() if folder else user_cache()
