import shutil

import pytest

from tests.cli.commands import TINY, recurjax
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(scope="session")
def trained():
    """The one run that every module here gets a copy of, once the first has made it."""
    return []


@pytest.fixture(scope="module")
def finished(quick_compilation, tmp_path_factory, trained):
    """A run of the tiny experiment, with checkpoints of its steps 6, 9 and 12."""
    if not trained:
        runs = tmp_path_factory.mktemp("trained")
        code, out, err = recurjax("train", TINY, "--runs", runs)
        assert (code, err) == (0, ""), (out, err)
        assert out.endswith(f"finished at step 12: {runs}/tiny\n")
        trained.append(runs / "tiny")
    return shutil.copytree(trained[0], tmp_path_factory.mktemp("runs") / "tiny")
