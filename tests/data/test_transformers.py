"""What transformers reads and renders, of our copies too, is what the records say."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from recurjax.data.tokenizers import load_tokenizer
from tests.data import chat_styles
from tests.data.tokenizers import text_folders
from tests.torch_python import PYTHON

pytestmark = pytest.mark.torch("transformers")

ROOT = Path(__file__).parents[2]


def record_of(module, *arguments: Path) -> dict:
    """Runs a module that writes a record; returns what it wrote."""
    command = [PYTHON, "-m", module.__name__, *map(str, arguments)]
    # Nothing is fetched: every file is here.
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    end = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    record = json.loads(arguments[0].read_text())
    del record["transformers"]  # its version
    return record


def recorded(module) -> dict:
    record = json.loads(module.RECORD.read_text())
    del record["transformers"]
    return record


@pytest.mark.parametrize("module", [text_folders, chat_styles], ids=["texts", "chats"])
def test_the_record_is_what_transformers_does(module, tmp_path):
    assert record_of(module, tmp_path / "record.json") == recorded(module)


def test_transformers_reads_from_saved_folders_what_it_reads_from_the_first(tmp_path):
    for kind in text_folders.KINDS:
        for way in text_folders.WAYS:
            first = tmp_path / "first" / kind / way
            first.mkdir(parents=True)
            text_folders.write_folder(first, kind, way)
            load_tokenizer(first).save(tmp_path / "saved" / kind / way)
    saved = record_of(text_folders, tmp_path / "record.json", tmp_path / "saved")
    assert saved == recorded(text_folders)
