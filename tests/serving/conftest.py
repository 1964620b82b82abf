"""One server for all tests here; its model's text is known beforehand."""

import pytest

from recurjax.data.tokenizers import ByteTokenizer
from recurjax.inference.engine import Engine
from tests.compiling import QUICK_COMPILE
from tests.inference.conftest import cycle, model

pytest.importorskip("starlette", reason="needs recurjax[serve]")
pytest.importorskip("uvicorn", reason="needs recurjax[serve]")
pytest.importorskip("jinja2", reason="needs recurjax[serve]")
pytest.importorskip("prometheus_client", reason="needs recurjax[serve]")

from recurjax.serving.prompt_scores import PromptScorer  # noqa: E402
from tests.serving.running import LETTERS, SIZES, running  # noqa: E402

__all__ = ["cycle", "model"]


@pytest.fixture(scope="session")
def engine(cycle):
    options = {"tokenizer": ByteTokenizer()}
    engine = Engine(cycle(LETTERS), SIZES, **options)
    engine.compile()
    return engine


@pytest.fixture(scope="session")
def scorer(cycle):
    options = {"length": 48, "top": 2, "compiler_options": QUICK_COMPILE}
    return PromptScorer(cycle(LETTERS), **options)


# It ends with this folder's tests and does not listen on while others run.
@pytest.fixture(scope="package")
def server(engine, scorer):
    with running(lambda: engine, scorer=scorer) as result:
        result.wait()
        yield result
