import pytest

from tests.compiling import all_compiled_quickly


@pytest.fixture(scope="module", autouse=True)
def programs_compiled_quickly():
    """Nearly all that these tests take is compiling what runs once."""
    with all_compiled_quickly():
        yield
