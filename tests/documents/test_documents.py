"""What README and guides say to type does run, in the order in which they say it."""

import json
import subprocess
import sys

import pytest

from recurjax.data.corpora import embedded_text
from recurjax.notebook import random_checkpoint
from tests.documents.blocks import Block, blocks_of
from tests.source_tree import ROOT
from tests.training.compilation import quick_compilation

__all__ = ["quick_compilation"]

FIRST = ROOT / "README.md"
GUIDES = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("own-text", "running", "compare", "evaluate", "export", "import"),
        *("fine-tuning", "hub", "serving", "pods"),
    )
]
"""Each begins in a folder with what the README's commands made."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize("document", [FIRST, *GUIDES], ids=lambda path: path.stem)
def test_every_block_says_whether_it_runs(document):
    for block in blocks_of(document):
        assert block.mark is not None, f"{block.place}: a block without a mark"
        if block.skip_reason is None:
            block.text()
        else:
            assert len(block.skip_reason.split()) > 2, f"{block.place}: why not?"


def test_a_mark_replaces_only_what_is_there():
    block = Block("a.md:1", "", "$ recurjax train FILE \\\n  --x 1  # no\nout\n", None)
    marked = block._replace(mark="run; FILE => my.py")
    assert marked.commands() == [["recurjax", "train", "my.py", "--x", "1"]]
    with pytest.raises(ValueError, match="no 'RUN' to replace"):
        block._replace(mark="run; RUN => r").text()
    with pytest.raises(ValueError, match="a mark is run or skip"):
        block.text()
    assert block._replace(mark="skip, it needs a network").skip_reason is not None


def write_inputs(folder):
    """Writes the files of the reader's own that the documents name."""
    text = embedded_text()
    for name in ("my.txt", "other.txt"):
        (folder / name).write_text(text[:20_000])
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text(text[:20_000])
    line = json.dumps({"text": text[:20_000]})
    (folder / "texts" / "a.jsonl").write_text(f"{line}\n")
    (folder / "prompts.txt").write_text("HAMLET\nROMEO\n")
    messages = [{"role": "user", "content": "Who?"}]
    messages += [{"role": "assistant", "content": "Romeo."}]
    row = json.dumps({"messages": messages})
    (folder / "chats.jsonl").write_text(f"{row}\n" * 40)
    [further] = [
        block.body
        for block in blocks_of(ROOT / "docs" / "import.md")
        if "def config()" in block.body
    ]
    (folder / "further.py").write_text(further)
    # In the place of a checkpoint of the Hub.
    random_checkpoint(folder / "tiny")
    (folder / "tiny" / "byte_tokenizer.json").unlink()  # its tokenizer.json chats
    (folder / "tiny" / "chat_template.jinja").write_text(TEMPLATE)


def steps_of(document) -> list[dict]:
    """Returns the steps of the blocks that run."""
    steps = []
    for block in blocks_of(document):
        if block.skip_reason is not None:
            continue
        if block.language == "python":
            step = {"place": block.place, "python": block.text()}
            if document == FIRST:  # as a comment in the block says
                step["equal"] = [["tail", "logits[:, 10:]"]]
            steps.append(step)
            continue
        steps += [{"place": block.place, "words": words} for words in block.commands()]
    return steps


@pytest.mark.slow
def test_what_the_documents_say_to_type_runs(tmp_path, quick_compilation):
    began = tmp_path / "began"
    began.mkdir()
    write_inputs(began)
    steps = steps_of(FIRST)
    for guide in GUIDES:
        steps += [{"guide": guide.stem}, *steps_of(guide)]
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(steps))
    done = subprocess.run(
        [sys.executable, "-m", "tests.documents.session", str(file)],
        cwd=began,
        env={**quick_compilation, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(
        *[x for x in done.stdout.splitlines() if x.startswith("document: ")], sep="\n"
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
