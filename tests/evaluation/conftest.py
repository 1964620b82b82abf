import pytest

from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """Nearly all that these tests take is compiling: tiny models of many kinds."""
