"""What pyproject.toml cannot say: a folder under another name, and the C++ kernels.

experiments/ is installed as recurjax_experiments. The folder keeps its place at the top
of the repository and its files their names; in an installed package they are data of a
package without code of its own, which `recurjax train quickstart` and its like find
(recurjax/run_table.py).

pallas_kernels/cpu is compiled where there is a C++ compiler, against the headers that
jaxlib brings. Without one, or where it fails, everything is installed but the kernels.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup

KERNELS = Path("pallas_kernels/cpu")


def cpu_kernels() -> list[Extension]:
    """Returns the library of C++ kernels; none without jaxlib's headers."""
    jaxlib = find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return []
    return [
        Extension(
            "pallas_kernels.cpu.kernels",
            sources=[str(KERNELS / "kernels.cc")],
            depends=sorted(str(header) for header in KERNELS.glob("*.h")),
            include_dirs=[str(Path(jaxlib.origin).parent / "include")],
            # -Wno-psabi: no vector crosses the library's border.
            extra_compile_args=["-O3", "-std=c++17", "-Wno-psabi"],
            language="c++",
            optional=True,
        )
    ]


setup(
    packages=[
        *find_packages(include=["recurjax*", "pallas_kernels*"]),
        "recurjax_experiments",
    ],
    package_dir={"recurjax_experiments": "experiments"},
    ext_modules=cpu_kernels(),
)
