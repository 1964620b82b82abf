"""One of two processes fails, or is killed: both end, and each says why."""

import re

import pytest

from recurjax.errors import UserError
from recurjax.machine import process_group
from tests.pairs import run_script
from tests.training.compilation import quick_compilation
from tests.training.run_contents import arrays, metrics

__all__ = ["quick_compilation"]

# What each process says last (None: nothing, it was killed), and its exit code.
BLIND = r"process 1 on \S+ does not see what process 0 on \S+ wrote to \S+: all proc"
SAID = {
    "data": {1: (2, "shard x is damaged"), 0: (2, "process 1 ended the run: shard x")},
    "tokenizer": {1: (2, "no tokenizer at"), 0: (2, "process 1 ended the run: no tok")},
    "restore": {1: (2, "9/state"), 0: (2, "process 1 ended the run: .* '9/state'")},
    "evaluation": {1: (70, "a bug"), 0: (2, "process 1 .* RuntimeError: a bug of")},
    "first": {0: (2, "No space left"), 1: (2, "process 0 ended the run: .* No space")},
    "apart": {0: (2, BLIND), 1: (2, BLIND)},
}
# A killed process leaves no message: jax's service aborts the others and says this.
LOST = {
    "killed_0": {0: (-9, ""), 1: (-6, "the leader task was preempted/died/restarted")},
    "killed_1": {1: (-9, ""), 0: (-6, r"stopped sending heartbeats\):\n1\n")},
}
SECONDS = 60.0
"""Far above what it takes (docs/pods.md), so that a busy machine passes."""


@pytest.fixture(scope="module")
def ended(quick_compilation, tmp_path_factory):
    """Runs all scenarios; a folder with what was said, and the ends of processes."""
    folder = tmp_path_factory.mktemp("faults")
    result = run_script(
        "tests.faulty_pair", folder, *SAID, *LOST, env=quick_compilation
    )
    return folder, result


def ends(ended, scenario):
    """Returns exit codes and seconds from the fault to the end, by process."""
    folder, result = ended
    fault = float((folder / scenario).read_text())
    return {
        end.rank: (end.code, end.at - fault) for end in result if end.name == scenario
    }


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SAID)
def test_a_fault_of_one_process_ends_both_with_a_sentence(ended, scenario):
    for rank, (code, seconds) in ends(ended, scenario).items():
        wanted, sentence = SAID[scenario][rank]
        said = (ended[0] / f"{scenario}.{rank}").read_text()
        assert code == wanted, said
        assert seconds < SECONDS, said
        ours = [line for line in said.splitlines() if line.startswith("recurjax: ")]
        assert len(ours) == 1 and re.search(sentence, ours[0]), said
        assert "stack trace" not in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LOST)
def test_when_one_process_is_killed_jax_ends_the_other_and_names_it(ended, scenario):
    for rank, (code, seconds) in ends(ended, scenario).items():
        wanted, message = LOST[scenario][rank]
        said = (ended[0] / f"{scenario}.{rank}").read_text()
        assert code == wanted and re.search(message, said), said
        assert seconds < SECONDS and "Traceback" not in said, said


@pytest.mark.slow
def test_what_was_being_saved_and_written_is_whole(ended):
    run = ended[0] / "runs_data" / "tiny"
    assert arrays(run)[0] == 4
    assert [row["step"] for row in metrics(run) if row["kind"] == "train"][-1] == 4


@pytest.mark.slow
def test_directories_of_ones_own_are_left_as_they_were(ended):
    assert not list(ended[0].glob("runs_apart.*"))


def test_one_process_sends_no_message():
    process_group.watch()
    assert not process_group.leave(UserError("of one process"))
    assert not process_group.is_leaving()
    process_group.end(3)


def test_an_error_of_the_network_may_be_anothers():
    lost = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    wrapped = UserError("checkpoint 3 could not be written")
    wrapped.__cause__ = lost
    may_come_from_a_peer = process_group._may_come_from_a_peer
    assert may_come_from_a_peer(lost) and may_come_from_a_peer(wrapped)
    assert not may_come_from_a_peer(UserError("no tokenizer at x"))


def test_actions_run_once_in_reverse_order_and_outlive_an_error():
    order, on_abort = [], process_group.on_abort
    with on_abort(lambda: order.append("first")):
        with on_abort(lambda: 1 / 0), on_abort(lambda: order.append(2)):
            process_group._run_actions()
        process_group._run_actions()
        assert order == [2, "first"]
