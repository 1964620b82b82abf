"""A bucket for tests: fsspec's store in memory, empty before and after each."""

import fsspec
import pytest

URL = "memory://bucket/runs/tiny"


@pytest.fixture(autouse=True)
def bucket():
    """An empty store; gives its objects' contents by name below the run."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    root = "/bucket/runs/tiny/"
    yield lambda: {
        name.removeprefix(root): file.getvalue()
        for name, file in memory.store.items()
        if name != f"{root}lock"
    }
    memory.store.clear()
