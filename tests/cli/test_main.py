import jax
import pytest

from recurjax.cli import main
from tests.cli.commands import assert_refused, recurjax


@pytest.fixture
def failing(monkeypatch):
    """Makes `recurjax train` raise what is given."""

    def fail(error):
        def run(argv):
            raise error

        monkeypatch.setattr(main, "_find", lambda name: run)

    return fail


def test_a_device_without_enough_memory_is_told_in_one_sentence(failing):
    failing(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"))
    assert_refused(recurjax("train"), "not enough memory .* raise --training.accumul")


def test_another_failure_of_the_runtime_keeps_its_traceback(failing):
    failing(jax.errors.JaxRuntimeError("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        recurjax("train")
