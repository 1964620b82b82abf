"""The table of mutations fits the tree that it mutates."""

import pytest

from tests.trials.mutations import ROOT, Mutation, apply, mutations

TABLE = mutations()


def test_each_mutation_changes_exactly_one_place_of_a_file():
    texts = {mutation.file: (ROOT / mutation.file).read_text() for mutation in TABLE}
    wrong = {
        one.name: texts[one.file].count(one.line)
        for one in TABLE
        if texts[one.file].count(one.line) != 1 or one.line == one.instead
    }
    assert wrong == {}
    assert len(TABLE) >= 95 and len({mutation.name for mutation in TABLE}) == len(TABLE)
    said = (ROOT / "docs" / "reliability.md").read_text()
    assert f"holds {len(TABLE)} wrong lines" in said
    same = {
        (mutation.file, mutation.line.strip(), mutation.instead.strip())
        for mutation in TABLE
    }
    assert len(same) == len(TABLE)


def test_the_tests_that_should_notice_it_are_there():
    places = {
        word
        for mutation in TABLE
        for word in mutation.tests.partition(" -k ")[0].split()
    }
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_a_mutation_changes_the_copy_and_says_what_was_there(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    mutation = Mutation(file="a.py", line="= 1", instead="= 3", tests="")
    assert apply(mutation, tmp_path) == "x = 1\ny = 2\n"
    assert (tmp_path / "a.py").read_text() == "x = 3\ny = 2\n"
    with pytest.raises(ValueError, match="found 0 times"):
        apply(mutation, tmp_path)
