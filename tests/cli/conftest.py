import pytest

from tests.cli.commands import TINY, recurjax
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module")
def finished(quick_compilation, tmp_path_factory):
    """A run of the tiny experiment, with checkpoints of its steps 6, 9 and 12."""
    runs = tmp_path_factory.mktemp("runs")
    code, out, err = recurjax("train", TINY, "--runs", runs)
    assert (code, err) == (0, ""), (out, err)
    assert out.endswith(f"finished at step 12: {runs}/tiny\n")
    return runs / "tiny"
