import dataclasses

import pytest

from recurjax.cli.options import override
from recurjax.errors import UserError
from tests.training.tiny_experiment import config
from tests.variants.rat.switches import WINDOW, rat, small


@pytest.fixture
def experiment():
    return dataclasses.replace(config(), model=small(rat(), WINDOW))


def test_a_field_of_a_config_in_a_tuple_is_an_option(experiment):
    words = ["--model.stack.pattern.0.chunk", "8", "--model.stack.pattern.1.window=5"]
    changed = override(experiment, words, prog="train")
    mixer, window = changed.model.stack.pattern
    assert mixer == rat(chunk=8)
    assert window == dataclasses.replace(WINDOW, window=5)
    assert dataclasses.replace(changed, model=experiment.model) == experiment


def test_a_field_that_the_entry_lacks_is_told(experiment):
    told = (
        r"no option --model.stack.pattern.1.chunk: did you mean --model.stack.pattern"
    )
    with pytest.raises(UserError, match=told):
        override(experiment, ["--model.stack.pattern.1.chunk", "8"], prog="train")
