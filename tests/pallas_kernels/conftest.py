"""Gives each law of `laws.OpLaws` the cases of the op that inherits it, and `triton`
launches to Triton's interpreter."""

import pytest

from tests.pallas_kernels import triton_interpreter


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "oracle_case" in metafunc.fixturenames:
        metafunc.parametrize("oracle_case", metafunc.cls.oracle_cases, ids=str)
    if "law_of" in metafunc.fixturenames:
        # A second word means other blocks, which may need switches of their own.
        names = [name for name in metafunc.cls.backends if " " not in name]
        metafunc.parametrize("law_of", [_marked(name) for name in names])


def _marked(backend: str):
    """Leaves the kernels' runs to `-m slow`: compiling each in Pallas takes seconds."""
    return pytest.param(backend, marks=() if backend == "xla" else pytest.mark.slow)


@pytest.fixture(scope="module")
def interpreted_launches():
    """Has Triton's interpreter run what backends launch; skips where it is absent."""
    reason = triton_interpreter.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with triton_interpreter.interpreted():
        yield
