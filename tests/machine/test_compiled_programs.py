"""Compiled programs on disk."""

import os
import subprocess
import sys

import pytest

from recurjax.errors import UserError
from recurjax.machine import compiled_programs
from recurjax.machine.caches import VARIABLE
from recurjax.machine.compiled_programs import ProgramCache
from tests.source_tree import ROOT


def test_what_is_put_is_got_by_another_process_too(tmp_path):
    ProgramCache(tmp_path / "a").put("key", b"program")
    assert ProgramCache(tmp_path / "a").get("key") == b"program"
    assert ProgramCache(tmp_path / "a").get("other") is None


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 60])
def test_a_damaged_entry_is_none_and_makes_way(tmp_path, damage):
    programs = ProgramCache(tmp_path)
    programs.put("key", b"program")
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert programs.get("key") is None
    programs.put("key", b"again")
    assert programs.get("key") == b"again"


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    programs = ProgramCache(tmp_path, largest=250)
    for age, key in enumerate("ab"):
        programs.put(key, bytes(70))
        os.utime(tmp_path / f"{key}.program", (age, age))
    assert programs.get("a") is not None  # so b is the older one
    programs.put("c", bytes(70))
    assert [programs.get(key) is None for key in "abc"] == [False, True, False]


def test_a_full_disk_costs_nothing_but_the_entry(tmp_path):
    programs = ProgramCache(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    programs.put("key", b"program")
    assert programs.get("key") is None


def test_a_folder_that_others_may_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    folder = tmp_path / "compiled" / compiled_programs._kind()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="is writable by others: chmod 700"):
        compiled_programs.keep()


def test_a_folder_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"RECURJAX_CACHE: .* or use --no-cache"):
        compiled_programs.keep()


def test_nothing_is_kept_where_the_variable_is_empty(monkeypatch):
    import jax

    monkeypatch.setenv(VARIABLE, "")
    before = jax.config.jax_compilation_cache_dir
    compiled_programs.keep()
    assert jax.config.jax_compilation_cache_dir == before


def test_a_jax_whose_cache_is_unknown_compiles_without(tmp_path, monkeypatch, capsys):
    from jax._src import compilation_cache

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.delattr(compilation_cache, "get_file_cache")
    compiled_programs.keep()
    assert "compiled programs are not cached, because" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


_SCRIPT = """
import warnings; warnings.simplefilter("error")
import jax, jax.numpy as jnp
from recurjax.machine import compiled_programs
compiled_programs._LEAST_SECONDS = 0.0
compiled_programs.keep()
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).sum())
print("hits", seen.count("/jax/compilation_cache/cache_hits"))
"""


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    def start():
        env = {**os.environ, VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-c", _SCRIPT]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    first, second = start(), start()
    assert first[0] == second[0]
    assert first[1] == "hits 0" and int(second[1].split()[1]) > 0
    files = list((tmp_path / "compiled").rglob("*.program"))
    assert files and not list(tmp_path.rglob("*.partial"))
    for file in files:
        file.write_bytes(file.read_bytes()[:50])
    assert start() == first
