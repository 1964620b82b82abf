"""Cheap compilation for tests that make many programs, in this process and others."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.compiling import QUICK_COMPILE


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """Keeps compiled programs on disk and lets LLVM optimize nothing.

    Yields the environment that gives another process the same settings.
    """
    directory = str(shared_by_workers(tmp_path_factory) / "compiled")
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    # This one is not an attribute of jax.config; it is off by default.
    settings |= {"jax_disable_most_optimizations": True}
    before |= {"jax_disable_most_optimizations": False}
    _update(settings)
    env = {name.upper(): str(value) for name, value in settings.items()}
    # As this process compiles, so that both compute the same bits.
    flags = [f"--{name}={value}".lower() for name, value in QUICK_COMPILE.items()]
    env["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    yield {**os.environ, **env, "JAX_PLATFORMS": "cpu"}
    _update(before)


@pytest.fixture
def quick_children(quick_compilation, monkeypatch):
    """Gives the processes that a test's code starts the same settings."""
    for name in quick_compilation:
        if name.startswith(("JAX_", "XLA_")):
            monkeypatch.setenv(name, quick_compilation[name])


@pytest.fixture
def unoptimized():
    """Lets LLVM optimize nothing: for programs that run a few times in this process."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _update(settings):
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def shared_by_workers(tmp_path_factory):
    """Returns the temporary folder of all processes that run tests together."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
