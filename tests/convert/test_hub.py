"""Models of the Hub, from one that answers on loopback."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recurjax.convert.hub import from_hub, imported_run, needed_files
from recurjax.convert.hugging_face import from_hf
from recurjax.errors import UserError
from recurjax.files.hub import Repository, parse_repository
from recurjax.parameters import to_nested_dict
from recurjax.training.checkpoint.manifest import named
from recurjax.training.run import load_run
from tests.cli.commands import assert_refused, recurjax
from tests.convert.hf_directories import LLAMA, copy_of
from tests.fake_hub import running_hub, sha256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = copy_of(LLAMA, tmp_path_factory.mktemp("llama") / "n", tokens=20)
    # What no conversion reads is not fetched either.
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    (folder / "README.md").write_text("a model")
    (folder / "modeling_n.py").write_text("raise SystemExit")
    (folder / "a.ipynb").write_text("{}")
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path) as hub:
        yield hub


def parameters(model):
    return named(to_nested_dict(model))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]))


def test_a_repository_is_converted_and_only_what_is_read_is_fetched(
    hub, checkpoint, tmp_path
):
    """Of a repository of the Hugging Face Hub weights, config and tokenizer are
    fetched: no pickle, no module and no notebook.
    """
    repository = hub.add("o/n", checkpoint)
    code, _, err = recurjax("convert", "from-hf", "o/n", tmp_path / "run", "--no-check")
    assert code == 0, err
    weights = sha256((checkpoint / "model.safetensors").read_bytes())
    assert sorted(hub.fetched()) == sorted(
        [f"/lfs/{weights}", "config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    # A revision that is a commit, and again from the cache of the Hub.
    hub.requests.clear()
    name = f"hf:o/n@{repository.branches['main']}"
    code, _, err = recurjax("convert", "from-hf", name, tmp_path / "two", "--no-check")
    assert (code, hub.fetched()) == (0, []), err


def test_a_second_start_asks_only_whether_the_branch_moved(hub, checkpoint):
    hub.add("o/n", checkpoint)
    run = imported_run(Path("hf:o/n"))
    assert run.name == "n" and load_run(run).step == 0
    hub.requests.clear()
    assert imported_run(Path("hf:o/n")) == run
    assert hub.requests == ["GET /api/models/o/n/revision/main"]
    assert imported_run(Path("runs/x")) == Path("runs/x")


@pytest.mark.slow  # Compiles what continues and scores.
def test_commands_take_a_repository_as_a_run(hub, checkpoint, tmp_path):
    hub.add("o/n", checkpoint)
    code, _, err = recurjax("generate", "hf:o/n", "--prompt", "w3", "--seed", "1")
    assert code == 0, err
    text = tmp_path / "text.txt"
    text.write_text("w3 w4 w5 " * 9)
    code, out, err = recurjax("evaluate", "hf:o/n", "--text", text, "--length", "8")
    assert code == 0, err
    # Evaluations of the same model are kept in its run directory.
    run = imported_run(Path("hf:o/n"))
    assert json.loads(out)["run"] == str(run)
    assert (run / "evaluations.jsonl").is_file()


def test_a_branch_that_moved_is_imported_again(hub, checkpoint):
    repository = hub.add("o/n", checkpoint)
    old = from_hub("o/n", report=print)
    assert_same(parameters(old.model), parameters(from_hf(checkpoint).model))
    files = dict(repository.commits[repository.branches["main"]])
    files["generation_config.json"] = b'{"temperature": 0.5}'
    before = repository.branches["main"]
    repository.commit(files)
    assert from_hub("o/n").tokenizer.settings.sampling == {"temperature": 0.5}
    assert from_hub(f"o/n@{before}").tokenizer.settings.sampling == {}


def test_what_is_wrong_on_the_hub_is_one_sentence(hub, checkpoint, tmp_path):
    def answer(name):
        return recurjax("convert", "from-hf", name, tmp_path / "run", "--no-check")

    hub.add("o/n", checkpoint)
    assert_refused(answer("o/gone"), "o/gone: the Hub has no such repository.*HF_TOK")
    assert_refused(answer("o/n@gone"), "o/n@gone: .* no such revision: name a branch")
    assert_refused(answer("hf:gone"), "hf:gone is not a repository: use hf:OWNER/NAME")
    hub.add("o/gated", checkpoint, gated=True)
    assert_refused(answer("o/gated"), "o/gated is gated: accept its terms.*HF_TOKEN")
    weights = (checkpoint / "model.safetensors").read_bytes()
    only = {"config.json": (checkpoint / "config.json").read_bytes()}
    hub.add("o/pickle", {**only, "pytorch_model.bin": b"."})
    assert_refused(answer("o/pickle"), "pickles .pytorch_model.bin.*never read: name a")
    hub.add("o/gguf", {"x-Q8_0.gguf": b"GGUF", "x-Q4_0.gguf": b"GGUF"})
    assert_refused(answer("o/gguf"), "download one of its GGUF files .x-Q4_0.gguf.")
    hub.add("o/bare", {"model.safetensors": weights})
    assert_refused(answer("o/bare"), "o/bare has no config.json")
    hub.add("o/empty", {"README.md": b"."})
    assert_refused(answer("o/empty"), "holds no weights that recurjax reads")
    assert hub.fetched() == [] and not (tmp_path / "run").exists()


def test_a_token_opens_what_is_private(hub, checkpoint, monkeypatch):
    """The token of `HF_TOKEN` is sent to the Hub at `HF_ENDPOINT` alone."""
    hub.add("o/mine", checkpoint, private=True)
    with pytest.raises(UserError, match="set HF_TOKEN to a token that may read it"):
        from_hub("o/mine")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert from_hub("o/mine").step == 0
    # Large files come from another host.
    assert any("/lfs/" in file for file in hub.fetched())
    assert not hub.store_has_token


def test_a_cut_connection_leaves_nothing_and_is_one_sentence(hub, checkpoint, tmp_path):
    hub.add("o/n", checkpoint)
    weights = sha256((checkpoint / "model.safetensors").read_bytes())
    hub.cut[weights] = 1000
    words = ("convert", "from-hf", "o/n", tmp_path / "run", "--no-check")
    assert_refused(recurjax(*words), "o/n: the Hub at .* cannot be used: ")
    assert not (tmp_path / "run").exists()
    hub.cut.clear()
    assert recurjax(*words)[0] == 0


def test_a_wrong_checksum_is_not_kept(hub, checkpoint, tmp_path):
    """A large file of `hf:OWNER/NAME` must have the SHA-256 that the Hub names."""
    hub.add("o/n", checkpoint)
    weights = (checkpoint / "model.safetensors").read_bytes()
    hub.lfs[sha256(weights)] = weights[:-1] + bytes([weights[-1] ^ 1])
    words = ("convert", "from-hf", "o/n", tmp_path / "run", "--no-check")
    assert_refused(recurjax(*words), "model.safetensors has another SHA-256")
    hub.lfs[sha256(weights)] = weights + b"more"
    assert_refused(recurjax(*words), "o/n: the Hub at .* cannot be used: .*size")
    hub.lfs[sha256(weights)] = weights
    assert recurjax(*words)[0] == 0


def test_offline_only_the_cache_is_read(hub, checkpoint, monkeypatch, tmp_path):
    from huggingface_hub import constants

    hub.add("o/n", checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match="HF_HUB_OFFLINE is set and o/n is not in the H"
    ):
        from_hub("o/n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    from_hub("o/n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    from_hub("o/n")
    # Without the imported copy too.
    words = ("convert", "from-hf", "o/n", tmp_path / "run", "--no-check")
    assert (recurjax(*words)[0], hub.requests) == (0, [])
    # A Hub that does not answer is as good as none, and that is said.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    sentences = []
    from_hub("o/n", report=sentences.append)
    assert len(sentences) == 1 and "in its cache is used" in sentences[0]
    with pytest.raises(UserError, match="o/other: the Hub at .*:9 cannot be used"):
        from_hub("o/other")


def test_names_of_repositories():
    assert parse_repository("o/n@refs/pr/1") == Repository(
        owner="o", name="n", revision="refs/pr/1"
    )
    for text in ("n", "o/n/x", "../n", "./n", "/o/n", "o/n@", "o/n x"):
        assert parse_repository(text) is None, text


def test_an_index_names_shards():
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    names = ["config.json", "model.safetensors.index.json", "x.safetensors", *shards]
    chosen = needed_files(Repository(owner="o", name="n"), names)
    assert chosen == ["config.json", "model.safetensors.index.json", *shards]


@pytest.mark.sweep
def test_the_environment_names_hub_cache_and_token(
    hub, checkpoint, quick_compilation, tmp_path
):
    hub.add("o/n", checkpoint, gated=True)
    environment = {
        **quick_compilation,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": hub.token,
        "HF_HUB_DISABLE_XET": "1",
        "RECURJAX_CACHE": str(tmp_path / "cache"),
    }
    words = ("generate", "hf:o/n", "--prompt", "w3", "--max-new-tokens", "2")
    command = [sys.executable, "-m", "recurjax", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home" / "hub" / "models--o--n").is_dir()
    hub.requests.clear()
    environment |= {"HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (again.returncode, hub.requests) == (0, []), again.stderr
    assert again.stdout == done.stdout
