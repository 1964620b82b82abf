"""A run directory: its files, loading a trained model from one, reading other runs'.

Other runs' parameters are those of `training.start_from` and an objective's frozen
model.
"""

import dataclasses
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from recurjax.data.tokenizers import Tokenizer, load_tokenizer
from recurjax.errors import UserError, first_few
from recurjax.experiment import (
    Experiment,
    differences,
    model_differences,
    read_experiment,
    write_experiment,
)
from recurjax.files.atomic import make_folders, write_atomic
from recurjax.files.json_files import json_text, read_json_object
from recurjax.files.metric_rows import read_rows
from recurjax.files.storage import url_of
from recurjax.machine.process_group import SharedError
from recurjax.model import (
    Decoder,
    ModelConfig,
    WeightDtype,
    in_weight_dtype,
    is_integer,
)
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.sharding import MeshConfig, make_mesh
from recurjax.surgery.adapters import adapted, merged, with_several
from recurjax.training.agreement import every_process, first_process
from recurjax.training.checkpoint import Checkpoints, NoGoodCheckpoint
from recurjax.training.program import model_shapes, placed_shapes
from recurjax.training.run.mirror import NO_STEP, fetched
from recurjax.training.spikes import SpikeConfig
from recurjax.training.step import trained_part, whole_model


class RunDirectory:
    """The files of one run; see `recurjax/training/README.md`."""

    def __init__(self, root: Path):
        """Touches nothing on disk; a `~` at the root's begin is the user's home."""
        # Expand `~` once for all files of a run: otherwise some would be in the user's
        # home and some in a folder named `~`.
        self.root = root = Path(os.path.expanduser(root))
        self.config = root / "config.json"
        self.metrics = root / "metrics.jsonl"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.tokenizer = root / "tokenizer"
        self.samples = root / "samples.txt"
        self.loss_plot = root / "loss.png"
        self.profile = root / "profile"
        self.log = root / "log"
        self.imported = root / "imported"
        self.starts = root / "starts.jsonl"
        self.trackers = root / "trackers.json"
        self.frozen = root / "frozen.json"

    @property
    def is_claimed(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint was written here, be it a damaged one."""
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def claim(self, experiment: Experiment, tokenizer: Tokenizer) -> None:
        """Makes the directory; config.json comes last, so it marks a complete claim."""
        self.root.mkdir(parents=True, exist_ok=True)
        tokenizer.save(self.tokenizer)
        # Of a try that saved nothing, which another teacher's may follow.
        self.frozen.unlink(missing_ok=True)
        write_experiment(experiment, self.config)

    def changes(self, experiment: Experiment) -> list[str]:
        """Lists what makes this experiment another run than the one started here."""
        stored = read_experiment(self.config)
        # Where no step depends on the run's end, neither by its rate nor by the weight
        # decay, a run may be made longer or shorter at any time.
        if not (stored.schedule.reads_steps or stored.optimizer.reads_steps):
            training = dataclasses.replace(
                stored.training, steps=experiment.training.steps
            )
            stored = dataclasses.replace(stored, training=training)
        # What may differ between parts of a run is made equal on both sides.
        return differences(_comparable(experiment), _comparable(stored))

    def check_resumable(self, experiment: Experiment) -> None:
        """Refuses to resume here with an experiment that is not the run's own.

        Raises:
          UserError: the run is another experiment's (the differing fields are named),
            or an imported model, which has no state of an optimizer.
        """
        if self.imported.exists():
            raise UserError(
                f"{self.root} holds an imported model, which has no training to "
                "resume: train in another directory with --training.start-from "
                f"{self.root}"
            )
        changed = self.changes(experiment)
        if changed:
            raise UserError(
                f"{self.root} holds a run of another config ({first_few(changed)}): "
                "choose another --name, or restore these settings to resume it"
            )

    def resume(self, experiment: Experiment) -> None:
        """Writes what may differ between the parts of a run, such as the mesh.

        Raises:
          UserError: as `check_resumable`.
        """
        self.check_resumable(experiment)
        write_experiment(experiment, self.config)

    def load_tokenizer(self, experiment: Experiment) -> Tokenizer:
        """Loads the run's own tokenizer.

        Raises:
          UserError: it is missing, damaged or not that of the run's model.
        """
        tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer.vocabulary != experiment.model.vocabulary:
            raise UserError(
                f"the tokenizer in {self.tokenizer} has {tokenizer.vocabulary} "
                f"tokens and the model {experiment.model.vocabulary}: restore the "
                "run's own tokenizer"
            )
        return tokenizer

    def frozen_step(self) -> int | None:
        """Returns which step of its objective's frozen model the run began with."""
        return self._frozen_before()["step"] if self._has_frozen else None

    def record_frozen(self, run: str, step: int, digest: str) -> None:
        """Writes down which frozen model a run is trained with, or compares with that.

        Raises:
          UserError: the run was begun with other parameters.
        """
        now = {"run": run, "step": step, "digest": digest}
        if not self._has_frozen:
            write_atomic(self.frozen, json_text(now, indent=2) + "\n")
            return
        before = self._frozen_before()
        if before["digest"] != digest:
            raise UserError(
                f"{self.root} began with other parameters of {before['run']} (step "
                f"{before['step']}, digest {before['digest'][:12]}) than {run} has "
                f"({digest[:12]}): restore those or start another run"
            )

    @property
    def _has_frozen(self) -> bool:
        return self.frozen.is_file()

    def _frozen_before(self) -> dict[str, Any]:
        values = read_json_object(self.frozen, "what a run was frozen with")
        kinds = {"run": str, "step": int, "digest": str}
        if any(not isinstance(values.get(name), kind) for name, kind in kinds.items()):
            raise UserError(
                f"{self.frozen} must have the run, step and digest of the frozen "
                "model: restore the file or start another run"
            )
        return values

    def rewind(self, step: int) -> str | None:
        """Drops metrics and samples of steps after `step`: they will run again.

        Returns:
          A sentence when metrics.jsonl has lines that are not rows: they are left out,
          and a copy of the original file is kept next to it.
        """
        if self.samples.is_file():
            text = self.samples.read_bytes()
            heads = re.finditer(rb"^=== step (\d+) ===$", text, re.MULTILINE)
            # Samples of later steps begin at the first such heading.
            cut = next((h.start() for h in heads if int(h[1]) > step), len(text))
            if cut < len(text):
                write_atomic(self.samples, text[:cut])
        if not self.metrics.is_file():
            return None
        content, message = read_rows(self.metrics), None
        if content.damaged:
            backup = _unused(self.metrics.with_name(f"{self.metrics.name}.damaged"))
            write_atomic(backup, self.metrics.read_bytes())
            message = (
                f"{content.damaged} damaged lines of {self.metrics} are left out; the "
                f"file as it was is kept as {backup.name}"
            )
        rows = (row for row in content.rows if row["step"] <= step)
        # Rewrite the complete lines only, which drops damaged ones.
        write_atomic(self.metrics, "".join(json_text(row) + "\n" for row in rows))
        return message

    def was_evaluated(self, step: int) -> bool:
        """Whether metrics.jsonl has a validation row of this step."""
        rows = read_rows(self.metrics).rows if self.metrics.is_file() else []
        return any(r["kind"] == "validation" and r["step"] == step for r in rows)

    def has_no_finite_loss(self, step: int) -> bool:
        """Whether this step was evaluated, and the loss was NaN or infinite."""
        return self.was_evaluated(step) and self.validation_loss(step) is None

    def validation_loss(self, step: int) -> float | None:
        """Returns the step's validation loss; None: there is none, or none finite."""
        rows = read_rows(self.metrics).rows if self.metrics.is_file() else []
        losses = [
            row.get("loss")
            for row in rows
            if row["kind"] == "validation" and row["step"] == step
        ]
        # The last row of the step: an evaluation may have been made twice.
        return losses[-1] if losses else None

    def append_samples(self, step: int, texts: list[str]) -> None:
        """Adds one evaluation's samples to samples.txt."""
        with self.samples.open("a", encoding="utf-8") as file:
            file.write(f"=== step {step} ===\n" + "\n---\n".join(texts) + "\n\n")


def _unused(file: Path) -> Path:
    """Returns `file`, or with the first number at its end that makes it a new name."""
    numbered = (file.with_name(f"{file.name}-{n}") for n in count(2))
    return next(name for name in chain([file], numbered) if not name.exists())


Base = dict[str, Any]
"""The run, step and digest of a model that adapters adapt, as a manifest has them."""


class LoadedRun(NamedTuple):
    """A trained model and what it was made with.

    Attributes:
      digest: names the parameters' values, see `Manifest.digest`; empty where they come
        from no checkpoint.
      base: which model adapters are of; None where `model` is all of it.
    """

    experiment: Experiment
    model: Decoder
    tokenizer: Tokenizer
    step: int
    digest: str = ""
    base: Base | None = None


def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    weights: WeightDtype | Literal["stored"] | None = None,
    report: Callable[[str], None] = print,
) -> LoadedRun:
    """Loads a run's model from its newest good checkpoint.

    Args:
      path: the run directory; one in a bucket is copied for the time of this call.
      step: the checkpoint of this step instead.
      mesh: devices that hold the parameters; None: one device.
      weights: in which dtype; "stored": as the checkpoint has them; None: so too, but
        integers as float32, which every caller can read.
      report: gets a sentence for each checkpoint that is damaged.

    Raises:
      UserError: not a run directory, no good checkpoint, or one that does not fit.
    """
    if (url := url_of(path)) is not None:
        with fetched(url, step=step) as copy:
            report_once = _once(report)
            while True:
                try:
                    return load_run(
                        copy.folder,
                        step=step,
                        mesh=mesh,
                        weights=weights,
                        report=report_once,
                    )
                except NoGoodCheckpoint:
                    if not copy.fetch_older():
                        raise
    mesh = _first_device() if mesh is None else mesh
    run = load_saved(path, step=step, mesh=mesh, report=report)
    if run.experiment.training.adapters is not None:
        run = _merged(run, mesh, report)
    stored = run.model.config.weight_dtype
    if weights is None:
        weights = "float32" if is_integer(stored) else stored
    model = in_weight_dtype(run.model, stored if weights == "stored" else weights)
    experiment = dataclasses.replace(run.experiment, model=model.config)
    return run._replace(experiment=experiment, model=model)


def load_adapters(
    base: LoadedRun,
    runs: Mapping[str, Path],
    *,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> Decoder:
    """Returns a base with the adapters of runs, which requests choose by number.

    Args:
      base: as `load_run` returns it, its weights in any dtype.
      runs: run directories by the adapters' names, at least one; the first one is
        number 1.
      mesh: mesh that holds the base.
      report: as `load_run`.

    Raises:
      UserError: a run has no adapters, has other parameters in addition to them, or
        adapts another base.
    """
    adapters = []
    for name, path in runs.items():
        run = load_saved(path, mesh=mesh, report=report)
        training = run.experiment.training
        if run.base is None or training.train_only is not None:
            raise UserError(
                f"--adapter {name}={path}: the run trained "
                f"{'no adapters' if run.base is None else 'more than adapters'}: name "
                "it as a model of its own"
            )
        if (other := _another_base(run.base, base)) is not None:
            raise UserError(
                f"--adapter {name}={path} is of another base: of {other}: name the "
                "base that it was trained on"
            )
        adapters.append(run.model)
    return with_several(base.model, adapters)


def _merged(run: LoadedRun, mesh: Mesh, report: Callable[[str], None]) -> LoadedRun:
    # The result is the base model with the adapters merged in.
    base, _ = load_start(run.experiment, mesh, report, base=run.base)
    model = merged(whole_model(run.model, adapted(base, run.experiment.training)))
    training = dataclasses.replace(run.experiment.training, adapters=None)
    experiment = dataclasses.replace(run.experiment, training=training)
    return run._replace(experiment=experiment, model=model, base=None)


def load_saved(
    path: str | Path,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    report: Callable[[str], None] = print,
) -> LoadedRun:
    """Loads a run's checkpoint; of a run of adapters only the trained part.

    Args, Raises: as `load_run`, of a folder.
    """
    run = RunDirectory(Path(path))
    if not run.root.is_dir():
        raise UserError(
            f"there is no run directory at {run.root}: check the path, or "
            "train a run first"
        )
    experiment = read_experiment(run.config)
    tokenizer = run.load_tokenizer(experiment)
    mesh = _first_device() if mesh is None else mesh
    shapes, training = model_shapes(experiment.model, mesh), experiment.training
    if training.adapters is not None:
        shapes = jax.eval_shape(lambda model: adapted(model, training), shapes)
        shapes = trained_part(placed_shapes(shapes, mesh), training.trained)
    checkpoints = Checkpoints(run.checkpoints, model=experiment.model)
    try:
        abstract = {"model": to_nested_dict(shapes)}
        restored = checkpoints.restore(abstract, step=step, report=report)
    finally:
        checkpoints.close()
    if restored is None:
        raise UserError(f"{run.root} has no checkpoint yet: train it first")
    return LoadedRun(
        experiment,
        from_nested_dict(shapes, restored.tree["model"]),
        tokenizer,
        restored.step,
        restored.digest,
        restored.base,
    )


def _first_device() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def _once(report: Callable[[str], None]) -> Callable[[str], None]:
    """Returns what tells of each checkpoint once: each try looks at all there are."""
    reported = set()

    def say(sentence: str) -> None:
        # What was wrong, after the colon, may be another array's fault the next time.
        checkpoint = sentence.partition(":")[0]
        if checkpoint not in reported:
            reported.add(checkpoint)
            report(sentence)

    return say


def _comparable(experiment: Experiment) -> Experiment:
    """Replaces what may change between parts of a run: devices, logging, samples."""
    training = dataclasses.replace(
        # Logging and keeping change no parameter; the spike rule may be corrected when
        # it has stopped a run.
        experiment.training,
        spikes=SpikeConfig(enabled=False),
        log_every=1,
        checkpoint_every=1,
        keep_checkpoints=1,
        profile=None,
        wandb_project=None,
        wandb_group=None,
        wandb_tags=(),
        mlflow_experiment=None,
    )
    evaluation = dataclasses.replace(
        experiment.evaluation,
        every=1,
        sample_prompts=(),
        sample_tokens=1,
        temperature=0.0,
    )
    data = dataclasses.replace(experiment.data, prefetch=0, threads=1)
    return dataclasses.replace(
        experiment,
        name="any",
        mesh=MeshConfig(),
        training=training,
        data=data,
        evaluation=evaluation,
    )


_WAIT_SECONDS = 10.0
"""A network file system may show a new file to other machines some seconds later."""


def check_shared(root: Path) -> None:
    """Refuses a run directory that every machine has for itself.

    Process 0 writes a word that nobody can know into the directory and all must read
    it. Without this a run on several machines would train to its end, each writing its
    own part of every checkpoint to its own disk, and none could be restored.

    Raises:
      SharedError: some processes do not see what process 0 wrote; in all of them.
      OSError: process 0 cannot write there.
    """
    if jax.process_count() == 1:
        return
    new: list[Path] = []
    file = root / ".seen-by-all"

    def write() -> str:
        new.extend(make_folders(root))
        word = secrets.token_hex(16)
        write_atomic(file, word)
        return word

    def remove() -> None:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: somebody else has begun to use it
            for folder in new:  # what is refused later leaves nothing behind
                folder.rmdir()

    word = first_process(write)
    # Every process looks for itself and tells all: a shared answer, the same for each.
    seen = [json.loads(text) for text in every_process(_look(file, word))]
    first_process(remove)
    blind = [number for number, (saw, _) in enumerate(seen) if not saw]
    if blind:
        rest = f" (and {len(blind) - 1} more)" if len(blind) > 1 else ""
        raise SharedError(
            f"process {blind[0]} on {seen[blind[0]][1]}{rest} does not see what "
            f"process 0 on {seen[0][1]} wrote to {root}: all processes of a run must "
            "share the run directory, so name a shared file system with --runs"
        )


def _look(file: Path, word: str) -> str:
    limit = time.monotonic() + _WAIT_SECONDS
    saw = False
    while not saw and time.monotonic() < limit:
        try:
            saw = file.read_text(encoding="utf-8") == word
        except OSError:
            saw = False
        if not saw:
            time.sleep(0.2)
    return json.dumps([saw, socket.gethostname()])


def check_start(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses, before anything is trained, parameters that do not fit.

    Raises:
      UserError: `training.start_from` is not a run directory, or has another model (the
        first few differences are named) or another tokenizer.
    """
    start = experiment.training.start_from
    if start is not None:
        _check_run(
            start,
            name="training.start_from",
            model=experiment.model,
            whose="this run",
            tokenizer=tokenizer,
        )


def check_frozen(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses, before anything is trained, a frozen model that is not as described.

    Raises:
      UserError: `objective.frozen.run` is not a run directory, or has another model
        than `objective.frozen.model` or another tokenizer than this run.
    """
    frozen = experiment.objective.frozen
    if frozen is not None:
        _check_run(
            frozen.run,
            name="objective.frozen.run",
            model=frozen.model,
            whose="objective.frozen.model",
            tokenizer=tokenizer,
        )


def load_start(
    experiment: Experiment,
    mesh: Mesh,
    report: Callable[[str], None],
    *,
    base: Base | None = None,
) -> tuple[Decoder, Base]:
    """Loads the parameters of `training.start_from`, onto the run's mesh.

    Args:
      base: the model that the run's adapters were trained on, which is loaded again;
        None: the newest.

    Raises:
      UserError: that model has other parameters.
    """
    start = experiment.training.start_from
    assert start is not None
    step = None if base is None else base["step"]
    run = load_run(start, step=step, mesh=mesh, weights="stored", report=report)
    if base is None:
        report(f"starting from the parameters of {start} at step {run.step}")
    elif (other := _another_base(base, run)) is not None:
        raise UserError(f"{start}: the adapters belong to {other}: restore that model")
    model = in_weight_dtype(run.model, experiment.model.weight_dtype)
    configured = _as_configured(model, experiment.model, mesh)
    return configured, {"run": start, "step": run.step, "digest": run.digest}


def _another_base(base: Base, run: LoadedRun) -> str | None:
    """Returns how a run differs from the base of adapters; None: it is that base."""
    if base["digest"] == run.digest:
        return None
    return (
        f"{base['run']} at step {base['step']} with checksum {base['digest'][:12]}, "
        f"and this one has {run.digest[:12]}"
    )


def load_frozen(
    experiment: Experiment,
    mesh: Mesh,
    report: Callable[[str], None],
    *,
    record: RunDirectory | None = None,
) -> Decoder | None:
    """Loads the objective's frozen model onto the run's mesh; None: it has none.

    Args:
      record: record of the run, where the model's path, step and digest are written
        down the first time. Later that step is loaded, whatever was trained since.

    Raises:
      UserError: the run was begun with other parameters.
    """
    frozen = experiment.objective.frozen
    if frozen is None:
        return None
    # A resumed run reads the very parameters that it began with.
    step = None if record is None else first_process(record.frozen_step)
    run = load_run(frozen.run, step=step, mesh=mesh, report=report)
    if record is not None:
        source = frozen.run, run.step, run.digest
        first_process(lambda: record.record_frozen(*source))
    report(f"the objective reads the frozen model of {frozen.run} at step {run.step}")
    model = in_weight_dtype(run.model, frozen.model.weight_dtype)
    return _as_configured(model, frozen.model, mesh)


def _as_configured(model: Decoder, config: ModelConfig, mesh: Mesh) -> Decoder:
    """Returns the parameters in a model of this config.

    Both are one function (`_check_run`), but an imported directory may have other
    activations' dtypes and other rematerialization than the step was built for.
    """
    return from_nested_dict(model_shapes(config, mesh), to_nested_dict(model))


def _check_run(
    path: str, *, name: str, model: ModelConfig, whose: str, tokenizer: Tokenizer
) -> None:
    if (url := url_of(path)) is not None:
        # Config and tokenizer are enough to compare: no checkpoint is copied.
        with fetched(url, step=NO_STEP) as copy:
            return _check_run(
                str(copy.folder),
                name=name,
                model=model,
                whose=whose,
                tokenizer=tokenizer,
            )
    directory = RunDirectory(Path(path))
    other = read_experiment(directory.config)
    if differing := model_differences(model, other.model):
        raise UserError(
            f"{name} {path} has another model than {whose} "
            f"({first_few(differing)}): restore these settings"
        )
    if directory.load_tokenizer(other).hash != tokenizer.hash:
        raise UserError(
            f"{name} {path} has another tokenizer than this run: use "
            f'TokenizerFile(path="{directory.tokenizer}")'
        )
