"""SECURITY.md as tests: each of its rules names the tests that hold it.

A rule is a row of a table or an item of a list. One that is new, or that changes its
first words, fails here until a test holds it.
"""

import ast
import re
import tomllib

import pytest

from recurjax.version import REPORTS
from tests.source_tree import ROOT, modules, tree_of

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
HELD = {
    "an experiment file": [
        "tests/test_run_table.py",
    ],
    "the interpreter of `--torch-python`": [
        "tests/convert/test_to_torch.py::"
        "test_an_interpreter_that_does_not_run_is_an_error"
    ],
    "`transformers`, where it is installed": [
        "tests/test_security.py::test_no_code_of_a_model_is_trusted"
    ],
    "notebooks and scripts in `experiments/`": ["tests/notebooks"],
    "a chat template, of a checkpoint": [
        "tests/data/test_hostile_templates.py::"
        "test_a_hostile_template_ends_in_a_sentence",
        "tests/data/test_hostile_templates.py::"
        "test_a_text_that_is_too_long_and_too_large_is_told",
    ],
    "A checkpoint, ours or another's": [
        "tests/convert/test_authors.py::"
        "test_files_of_torch_that_hold_code_are_not_unpickled",
        "tests/test_security.py::test_no_pickle_is_read",
    ],
    "`decoder_recurjax.py` and the other modules": [
        "tests/convert/test_to_torch.py::test_what_came_with_the_weights_is_not_run"
    ],
    "Of a repository of the Hugging Face Hub": [
        "tests/convert/test_hub.py::"
        "test_a_repository_is_converted_and_only_what_is_read_is_fetched",
        "tests/test_security.py::test_no_code_of_a_model_is_trusted",
    ],
    "A tokenizer, a prepared directory, a run": [
        "tests/files/test_arrays.py::"
        "test_a_bad_array_is_one_sentence_and_takes_no_memory",
        "tests/files/test_arrays.py::"
        "test_an_exit_head_is_read_and_anything_else_refused",
    ],
    "The shards that `model.safetensors.index": [
        "tests/files/test_json_files.py::test_names_stay_inside_their_folder",
        "tests/data/prepared/test_prepare.py::"
        "test_a_manifest_cannot_name_a_file_outside_the_folder",
    ],
    "`hf:OWNER/NAME` trusts the Hub": [
        "tests/convert/test_hub.py::test_a_wrong_checksum_is_not_kept",
        "tests/convert/test_hub.py::test_a_token_opens_what_is_private",
    ],
    "A bucket's listing names the objects": [
        "tests/files/test_storage.py::"
        "test_an_object_whose_name_leads_out_of_its_folder_is_refused"
    ],
    "A run's `config.json` names its corpus": ["tests/training/run"],
    "JSON is refused when it is nested": [
        "tests/files/test_json_files.py::test_what_is_wrong_is_told_in_a_sentence"
    ],
    "A text of a user never becomes a special": [
        "tests/data/test_chat.py::test_a_name_that_a_user_types_is_text",
        "tests/data/test_chat.py::test_a_name_is_text_wherever_a_conversation_has_it",
    ],
    "A Host that is not the server's": [
        "tests/serving/test_strangers.py::test_a_server_answers_to_its_own_names_alone",
        "tests/serving/test_strangers.py::test_pages_of_other_sites_may_not_ask",
        "tests/serving/test_strangers.py::test_a_body_must_say_that_it_is_json",
    ],
    "What is too long, before any work": [
        "tests/serving/test_strangers.py::test_the_limits_are_those_of_the_document",
        "tests/serving/test_strangers.py::"
        "test_an_open_server_without_a_key_is_warned_of",
    ],
    "A model's text is printed on a terminal": [
        "tests/machine/test_terminal.py::test_a_models_text_is_no_command_to_a_terminal"
    ],
    "The compilers of `recurjax plan`": [
        "tests/cli/test_shipped.py::"
        "test_compilers_of_known_versions_must_have_their_hashes"
    ],
}
"""The tests of each rule, by its first words; a folder or a file: all that is there."""
PRIVATE = {
    "jax._src": "jax",
    "orbax.checkpoint._src": "orbax-checkpoint",
    "uvicorn.protocols": "uvicorn",
}
"""Modules that their packages may change in any release, and the packages."""


def rules() -> list[str]:
    """Lists the rows and items of SECURITY.md."""
    rows = [line[2:] for line in TEXT.splitlines() if line.startswith("| ")]
    items = [line[2:] for line in TEXT.splitlines() if line.startswith("- ")]
    return [*(row for row in rows if row != "what | when |"), *items]


def test_each_rule_has_tests():
    unheld = [
        rule for rule in rules() if not any(rule.startswith(first) for first in HELD)
    ]
    assert unheld == []
    gone = [first for first in HELD if not any(r.startswith(first) for r in rules())]
    assert gone == []


@pytest.mark.parametrize("first", HELD)
def test_the_tests_of_a_rule_are_there(first):
    for place in HELD[first]:
        file, _, name = place.partition("::")
        assert (ROOT / file).exists(), place
        assert not name or f"def {name}(" in (ROOT / file).read_text(), place


def sources() -> dict[str, str]:
    return {name: path.read_text() for name, path in modules().items()}


def test_no_pickle_is_read():
    """Nothing unpickles: numpy is never allowed to, torch reads tensors alone."""
    for name, text in sources().items():
        words = re.findall(r"^\s*(?:import|from) (?:pickle|dill|marshal)\b", text, re.M)
        assert words == [] and "allow_pickle=True" not in text, name
        if ".torch.modules." not in name:
            calls = re.findall(r"torch\.load\([^)]*\)", text)
            assert all("weights_only=True" in call for call in calls), name


def test_no_code_of_a_model_is_trusted():
    """`trust_remote_code` is never set."""
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", name


def test_the_address_for_reports_is_one_constant():
    assert REPORTS in " ".join(TEXT.split())
    elsewhere = [
        name
        for name, text in sources().items()
        if name != "recurjax.version" and REPORTS in text
    ]
    assert elsewhere == []


def test_private_modules_are_of_packages_with_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(line for lines in extras for line in lines)]
    for module, package in PRIVATE.items():
        lines = [line for line in wanted if re.match(rf"{package}(\[\w+\])?>=", line)]
        assert lines and all("<" in line for line in lines), module
    for name, text in sources().items():
        private = re.findall(
            r"(?:from|import) ((?!recurjax)\w[\w.]*\._[a-z][\w.]*)", text
        )
        assert all(p.startswith(tuple(PRIVATE)) for p in private), (name, private)
