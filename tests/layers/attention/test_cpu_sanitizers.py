"""The C++ kernels under g++'s address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys

import jax
import pytest

from tests.source_tree import ROOT

CODE = """
import sys
from pallas_kernels import cpu
cpu._file = lambda: sys.argv[1]
import jax
from pallas_kernels.cpu.cache_read import attend
from pallas_kernels.cpu.few_rows import few_rows
from pallas_kernels.cpu.panels import multiply, panels_of
from tests.layers.attention import test_cache_read
from tests.layers.attention.test_cpu import CASES, both, make
from tests.pallas_kernels import test_few_rows, test_panels
assert cpu.refusal() is None, cpu.refusal()
for lanes in {16, 8, 4} & {cpu.lanes(), min(cpu.lanes(), 8)}:
    cpu.lanes = lambda: lanes
    for case in CASES.values():
        for dtype in ("float32", "bfloat16"):
            arrays, options, _ = make(dtype=dtype, **case)
            jax.block_until_ready(both("cpu", options)(*arrays))
    for case in test_cache_read.CASES.values():
        for dtype in ("float32", "bfloat16"):
            arrays, options = test_cache_read.draw(**case, dtype=dtype)
            jax.block_until_ready(attend(*arrays, **options))
    for size in test_few_rows.SIZES.values():
        x, weight = test_few_rows.draw(7, *size)
        jax.block_until_ready(few_rows(x, weight))
        jax.block_until_ready(few_rows(x, weight.T, transposed=True))
    for size in test_panels.SIZES.values():
        x, weight = test_panels.draw(9, *size)
        jax.block_until_ready(multiply(x, panels_of(weight), columns=size[1]))
print("no report")
"""


@pytest.mark.slow
def test_the_kernels_pass_the_sanitizers(tmp_path):
    """Four threads, so that keys are shared out among them."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = tmp_path / "kernels.so"
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = ROOT / "pallas_kernels" / "cpu" / "kernels.cc"
    flags = ["-O1", "-g", "-std=c++17", "-Wno-psabi", "-fPIC", "-shared"]
    headers = ["-isystem", jax.ffi.include_dir()]
    build = ["g++", *flags, *checks, *headers, source, "-o", library]
    subprocess.run(build, check=True)

    def runtime(name: str) -> str:
        found = ["g++", f"-print-file-name={name}"]
        return subprocess.check_output(found, text=True).strip()

    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NPROC": "4",
        # The interpreter was not built with them.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # Python frees little at its end.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, library],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "no report" in done.stdout, done.stderr[-4000:]
