import shutil

import pytest

from tests.training.compilation import quick_compilation
from tests.training.tiny_run import finished_tiny_run

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module")
def finished(quick_compilation, tmp_path_factory):
    """A run of the tiny experiment, with checkpoints of its steps 6, 9 and 12."""
    trained = finished_tiny_run(tmp_path_factory)
    return shutil.copytree(trained, tmp_path_factory.mktemp("runs") / "tiny")
