"""A run of two processes in a bucket: each sends its part of every checkpoint.

The bucket is a folder that only fsspec's store sees: each process works in a folder of
its own, as on machines that share no disk.
"""

import pytest

from recurjax.training.run import load_run
from tests.killed_pair import train_in_pairs
from tests.training.run_contents import assert_same_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(quick_compilation, tmp_path_factory):
    """The run of two processes that nobody stopped, in one folder of both."""
    folder = tmp_path_factory.mktemp("two")
    codes = train_in_pairs(folder / "said", folder / "runs", [0], quick_compilation)
    assert codes == {0: {0: 0, 1: 0}}, (folder / "said" / "0.0").read_text()
    return folder / "runs" / "tiny"


@pytest.mark.sweep
def test_two_processes_resume_from_parts_bit_for_bit(
    whole, quick_compilation, tmp_path
):
    said = tmp_path / "said"
    # Counted from where each start resumes; processes 0 and 1 are killed in turns.
    codes = train_in_pairs(said, "memory://bucket", [5, 5, 0], quick_compilation)
    last = (said / "2.0").read_text()
    assert codes[2] == {0: 0, 1: 0}, last
    # One is killed, jax's service aborts the other.
    assert codes[0] == {0: -9, 1: -6} and codes[1] == {1: -9, 0: -6}, codes
    assert "resuming at step" in last and "finished at step 12" in last
    run = said / "memory" / "bucket" / "tiny"
    assert_same_run(run, whole)
    # The store's emptied folders stay, which a bucket does not have.
    steps = {path.parent.name for path in run.glob("checkpoints/*/commit_success.txt")}
    assert steps == {path.name for path in (whole / "checkpoints").iterdir()}
    state = run / "checkpoints" / "12" / "state"
    # Both have written; what is joined when it is read is not sent.
    parts = {path.name for path in state.glob("ocdbt*")}
    assert parts == {"ocdbt.process_0", "ocdbt.process_1"}
    assert not (state / "manifest.ocdbt").exists()
    assert not (run / "lock").exists()
    # Read by one process, from a disk as from a bucket, and changed by neither.
    before = sorted(path.name for path in state.iterdir())
    assert load_run(run).digest == load_run(whole).digest
    assert sorted(path.name for path in state.iterdir()) == before
