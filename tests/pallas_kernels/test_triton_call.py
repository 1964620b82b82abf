"""Which packages the kernels in Triton's language need."""

from types import SimpleNamespace

import pytest

from pallas_kernels import triton_call


@pytest.mark.parametrize(
    ("triton", "jax_triton", "message"),
    [
        (None, None, 'needs jax-triton .*: pip install "recurjax.cuda.'),
        ("3.5.1", (0, 3, 1), "needs triton 3.6 or newer, found 3.5.1; install it"),
        ("3.9.0", (0, 4, 1), "needs jax-triton 0.3, found 0.4.1; install it"),
        ("3.10.0", (0, 3, 1), None),
    ],
)
def test_packages_that_are_missing_or_unfit_are_named(
    monkeypatch, triton, jax_triton, message
):
    def find(name):
        if triton is None:
            raise ImportError(f"No module named {name!r}")
        if name == "triton":
            return SimpleNamespace(__version__=triton)
        version = ".".join(map(str, jax_triton))
        return SimpleNamespace(__version__=version, __version_info__=jax_triton)

    monkeypatch.setattr(triton_call.importlib, "import_module", find)
    triton_call.missing_package.cache_clear()
    triton_call._warn.cache_clear()
    try:
        if message is None:
            assert triton_call.refusal_of_packages() is None
        else:
            with pytest.warns(UserWarning, match=f"scans run on XLA .*{message}"):
                triton_call.refusal_of_packages()
    finally:
        triton_call.missing_package.cache_clear()
        triton_call._warn.cache_clear()
