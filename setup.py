"""What pyproject.toml cannot say: experiments/ is installed as recurjax_experiments.

The folder keeps its place at the top of the repository and its files their names; in an
installed package they are data of a package without code of its own, which
`recurjax train quickstart` and its like find (recurjax/run_table.py).
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["recurjax*", "pallas_kernels*"]),
        "recurjax_experiments",
    ],
    package_dir={"recurjax_experiments": "experiments"},
)
