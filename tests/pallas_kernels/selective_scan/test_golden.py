"""The scans of the Mamba authors' own code: values, states and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.selective_scan import SelectiveScanOutputs, selective_scan
from pallas_kernels.selective_scan.reference import selective_scan_reference
from tests.compiling import QUICK_COMPILE
from tests.golden.cases import golden_cases, load
from tests.tolerances import assert_close

CASES = golden_cases("recurformer/scan*.npz")
# Their names of the arrays, [B, I, T] and [B, N, T] where ours are [B, T, ...].
BY_POSITION = {"u": "u", "dt": "delta", "b": "B", "c": "C", "z": "z"}
WHOLE = {"skip": "D", "dt_bias": "delta_bias", "initial": "initial_state"}
READ = {
    *("A", "A_log", "segment_starts", "loss_weights", "last_state_weights"),
    *("y", "last_state", "y_float64", "last_state_float64"),
    *BY_POSITION.values(),
    *WHOLE.values(),
}


def read_case(path):
    """Returns (arrays with a gradient, starts, the file)."""
    case = load(path)
    gradients = {
        name
        for name in case
        if name.removeprefix("state_").removeprefix("grad_") in case
    }
    unknown = set(case) - READ - gradients - {f"{name}_float64" for name in gradients}
    assert not unknown, f"{path.name} has {sorted(unknown)}"
    arrays = {k: case[v].swapaxes(1, 2) for k, v in BY_POSITION.items() if v in case}
    arrays |= {k: case[v] for k, v in WHOLE.items() if v in case}
    arrays["a"] = case["A_log"] if "A_log" in case else case["A"]
    starts = case.get("segment_starts")
    starts = None if starts is None else jnp.asarray(starts, bool)
    return jax.tree.map(jnp.asarray, arrays), starts, case


def passes(function, arrays, starts, case):
    """Returns (y, last state), and gradients of both of the file's sums."""

    def scan(arrays) -> SelectiveScanOutputs:
        a = -jnp.exp(arrays["a"]) if "A_log" in case else arrays["a"]
        return SelectiveScanOutputs(*function(**(arrays | {"a": a}), starts=starts))

    @partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays):
        out, pull = jax.vjp(scan, arrays)
        of_y = jnp.asarray(case["loss_weights"].swapaxes(1, 2), out.y.dtype)
        of_state = jnp.asarray(
            case.get("last_state_weights", 0 * case["last_state"]), out.final.dtype
        )
        (by_y,) = pull(SelectiveScanOutputs(of_y, jnp.zeros_like(out.final)))
        (by_state,) = pull(SelectiveScanOutputs(jnp.zeros_like(out.y), of_state))
        return out, by_y, by_state

    return run(arrays)


def wanted_gradients(prefix, case):
    """Returns the file's gradients under our names; those it leaves out are none."""
    names = {**BY_POSITION, **WHOLE, "a": "A_log" if "A_log" in case else "A"}
    matches = {k: case[prefix + v] for k, v in names.items() if prefix + v in case}
    return {k: x.swapaxes(1, 2) if k in BY_POSITION else x for k, x in matches.items()}


def test_there_are_cases_with_and_without_segments():
    starts = ["segment_starts" in load(case.values[0]) for case in CASES]
    assert any(starts) and not all(starts)


@pytest.mark.parametrize("function", [selective_scan, selective_scan_reference])
@pytest.mark.parametrize("path", CASES)
def test_values_and_gradients_are_the_authors(path, function):
    arrays, starts, case = read_case(path)
    out, by_y, by_state = passes(function, arrays, starts, case)
    want = SelectiveScanOutputs(case["y"].swapaxes(1, 2), case["last_state"])
    assert_close(out, want, dtype="float32", tolerance=1e-5)
    of_y = wanted_gradients("grad_", case)
    assert set(of_y) == set(arrays)
    assert_close(by_y, of_y, dtype="float32", tolerance=1e-4)
    of_state = wanted_gradients("state_grad_", case)
    by_state = {name: by_state[name] for name in of_state}
    assert_close(by_state, of_state, dtype="float32", tolerance=1e-4)


@pytest.mark.parametrize("path", CASES)
def test_float64_is_exact(path):
    with jax.enable_x64(True):
        arrays, starts, case = read_case(path)
        if "y_float64" not in case:
            pytest.skip("the file has no values in float64")
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
        out, _, _ = passes(selective_scan, wide, starts, case)
        want = SelectiveScanOutputs(
            case["y_float64"].swapaxes(1, 2), case["last_state_float64"]
        )
        assert_close(out, want, dtype="float64", tolerance=1e-12)
