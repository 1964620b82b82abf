"""A run's open resources: data, devices, checkpoints, and the initial state."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recurjax.config_json import from_json, to_json
from recurjax.data.answers import AnswersDataset
from recurjax.data.config import Mixture, Prepared
from recurjax.data.dataset import (
    AnyDataset,
    MixtureDataset,
    SplitName,
    lossy_note,
    open_dataset,
)
from recurjax.data.loader import CarriedBatches, ChainedLoader, Loader, RowLoader
from recurjax.data.prepared import verify_checksums
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import Score, joined, score
from recurjax.experiment import Experiment
from recurjax.files.storage import url_of
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.sharding import local_rows, make_mesh, place, placed
from recurjax.training.agreement import first_process
from recurjax.training.checkpoint import Checkpoints, named, nested
from recurjax.training.program import Metrics, build_step
from recurjax.training.run import (
    Base,
    Mirror,
    RunDirectory,
    check_frozen,
    check_shared,
    check_start,
    load_frozen,
    load_start,
)
from recurjax.training.step import TrainState, trained_part, whole_model
from recurjax.types import IGNORED, Batch


class Session:
    """The means of one call of `train`; every process of a run has its own.

    Raises:
      UserError: config, data, devices and run directory do not go together.
    """

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        *,
        mirror: Mirror | None = None,
    ):
        # As it will be read back from config.json, before anything is built from it.
        experiment = from_json(Experiment, to_json(experiment), path="config")
        self.experiment, self.directory = experiment, RunDirectory(root)
        if mirror is None:
            check_shared(self.directory.root)
        self.mesh = make_mesh(experiment.mesh)
        self._step = build_step(
            experiment, self.mesh, data_changes=experiment.data_changes
        )
        self._resumes = self._refuse_another_run()
        self.dataset = self._open_dataset()
        tokenizer = self.dataset.tokenizer
        _refuse_another_vocabulary(experiment, self.dataset)
        _refuse_unusable_prompts(experiment, tokenizer)
        self._refuse_rows_beyond_positions()
        loader, self._validation = self._loader("train"), self._loader("validation")
        if not self.directory.has_checkpoint:
            check_start(experiment, tokenizer)
        check_frozen(experiment, tokenizer)
        if not self._resumes:
            _refuse_damaged_shards(experiment)
            # Only now: a run that is refused leaves nothing behind.
            first_process(lambda: self.directory.claim(experiment, tokenizer))
        self._checkpoints = Checkpoints(
            self.directory.checkpoints,
            keep=experiment.training.keep_checkpoints,
            model=experiment.model,
            after_write=None if mirror is None else mirror.push,
            before_read=None if mirror is None else mirror.fetch_arrays,
            apart=mirror is not None and mirror.parts > 1,
        )
        self._batches = self._carried(iter(loader))
        # Epochs of prompts with answers are counted, of other data steps alone.
        examples = isinstance(self.dataset, AnswersDataset)
        self._rows_of_epoch = (
            loader.count if examples and isinstance(loader, RowLoader) else None
        )
        self._frozen: Decoder | None = None
        self._base: Base | None = None

    def start(self, report: Callable[[str], None]) -> TrainState:
        """Restores the newest good checkpoint, or initialises the model.

        Args:
          report: gets a sentence for each checkpoint that is damaged, and for metrics
            that are.

        Raises:
          UserError: the run is past `training.steps`, or its data or the objective's
            frozen model are others than it began with; its files are then as before.
        """
        self._frozen = load_frozen(
            self.experiment, self.mesh, report, record=self.directory
        )
        expected = self._saved(self._step.state)
        if (note := lossy_note(self.dataset)) is not None:
            report(note)
        tree = to_nested_dict(expected)
        # The spike rule starts over if its state has another window, or is of a version
        # that stored less.
        restored = self._checkpoints.restore(tree, report=report, optional=_WINDOW)
        reached = 0 if restored is None else restored.step
        # The run has done more steps: the user has to choose an older checkpoint.
        if reached > self.experiment.training.steps:
            raise UserError(
                f"{self.directory.root} is at step {reached} already, and "
                f"--training.steps is {self.experiment.training.steps}: raise it"
            )
        if restored is not None:
            # The data continues after the last batch that was trained on.
            self._batches.set_state(restored.data_state)
        # Only now is the run known to continue: what is refused leaves its files alone.
        if self._resumes:
            first_process(lambda: self.directory.resume(self.experiment))
        # A killed run may have written rows of steps after its last checkpoint: those
        # steps run again and rewrite their rows.
        if message := first_process(lambda: self.directory.rewind(reached)):
            report(message)
        training = self.experiment.training
        if restored is not None and training.adapters is None:
            return from_nested_dict(expected, self._with_window(restored.tree))
        if restored is None and training.start_from is None:
            return self._step.initialise(jax.random.key(training.seed))
        before = None if restored is None else restored.base
        model, base = load_start(self.experiment, self.mesh, report, base=before)
        self._base = None if training.adapters is None else base
        state = self._step.begin(model)
        if restored is None:
            return state
        saved = from_nested_dict(expected, self._with_window(restored.tree))
        return saved._replace(model=whole_model(saved.model, state.model))

    def _saved(self, state: TrainState) -> TrainState:
        """Returns what checkpoints hold: all, or of adapters what is trained."""
        training = self.experiment.training
        if training.adapters is None:
            return state
        return state._replace(model=trained_part(state.model, training.trained))

    def _with_window(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Lets the spike rule begin again where a checkpoint lacks a part of it."""
        leaves = named(tree)
        expected = named(to_nested_dict(self._saved(self._step.state)))
        if all(leaves[name] is not None for name in _WINDOW):
            return tree
        fresh = {
            name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for name, leaf in expected.items()
            if name in _WINDOW
        }
        return nested({**leaves, **fresh})

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Reads one batch and trains on it; `state` is used up.

        The metrics are those of `Step`.
        """
        return self.step_on(state, self.next_batch())

    def next_batch(self) -> Batch:
        """Reads the next batch and puts it on the devices."""
        rows, batch = next(self._batches), self.experiment.training.batch
        self._refuse_more_answers(rows["targets"])
        return place(rows, self.mesh, batch=batch)

    def _refuse_more_answers(self, targets: np.ndarray) -> None:
        answers = self.experiment.objective.answers
        if answers is None:
            return
        most = int((targets != IGNORED).sum(1).max())
        if most > answers:
            raise UserError(
                f"objective.answers is {answers} and a row has {most} targets: "
                "raise it or leave it out"
            )

    def step_on(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Trains on a batch; `state` is used up."""
        return self._step(state, batch, self._frozen)

    def epochs(self, step: int) -> dict[str, float]:
        """Counts the passes over prompts with answers; nothing of other data."""
        if self._rows_of_epoch is None:
            return {}
        training = self.experiment.training
        rows = step * training.batch / training.carry
        return {"epoch": rows / self._rows_of_epoch}

    def evaluate(self, state: TrainState, between: Callable[[], None]) -> Score:
        """Scores the validation split, or its first `evaluation.batches`.

        Of a mixture the first of each part, which has a score of its own.
        """
        if isinstance(self._validation, ChainedLoader):
            assert isinstance(self.dataset, MixtureDataset)
            sizes = {n: part.token_bytes for n, part in self.dataset.parts.items()}
            parts = self._validation.parts.items()
            return joined(
                {n: self._scored(state, p, sizes[n], between) for n, p in parts}
            )
        sizes = self.dataset.token_bytes
        return self._scored(state, self._validation, sizes, between)

    def _scored(
        self,
        state: TrainState,
        loader: Any,
        token_bytes: np.ndarray,
        between: Callable[[], None],
    ) -> Score:
        batches, rows = iter(loader), self.experiment.evaluation_batch
        limit = self.experiment.evaluation.batches
        # The first batches of the split, the same at every evaluation.
        limited = islice(batches, limit)
        try:
            with jax.set_mesh(self.mesh):
                return score(
                    state.model,
                    placed(limited, self.mesh, batch=rows),
                    token_bytes=token_bytes,
                    objective=self.experiment.objective,
                    between=between,
                    labels=self.dataset.labels("validation", batch=rows),
                    mesh=self.mesh,
                )
        finally:
            batches.close()

    def save(self, state: TrainState, step: int, loss: float | None = None) -> None:
        """Saves in the background; a failure comes out at the next save or close."""
        self._checkpoints.save(
            step,
            to_nested_dict(self._saved(state)),
            data_state=self._batches.get_state(),
            loss=loss,
            base=self._base,
        )

    def wait(self) -> None:
        """Waits until the last save is on disk."""
        self._checkpoints.wait()

    def finish_save(self) -> None:
        """Waits until a background save is on disk; removes no checkpoint."""
        self._checkpoints.finish()

    def checkpoints(self) -> list[int]:
        """Lists the complete steps, oldest first."""
        return self._checkpoints.steps()

    def close(self) -> None:
        """Ends what runs in the background; waits for a save."""
        self._batches.close()
        self._checkpoints.close()

    def _refuse_another_run(self) -> bool:
        """Refuses a directory of another run; returns whether there is one to resume.

        Process 0 looks and decides for all.
        """
        directory = self.directory

        def resumes() -> bool:
            # A run that has saved nothing can start again with other settings.
            return directory.is_claimed and (
                directory.has_checkpoint or not directory.changes(self.experiment)
            )

        if not first_process(resumes):
            return False
        first_process(lambda: directory.check_resumable(self.experiment))
        return True

    def _open_dataset(self) -> AnyDataset:
        """Opens the data, with the run's own tokenizer where it has one."""
        data, tokenizer = self.experiment.data, None
        if self._resumes:
            tokenizer = self.directory.load_tokenizer(self.experiment)
        return open_dataset(data, tokenizer=tokenizer)

    def _refuse_rows_beyond_positions(self) -> None:
        for split in ("train", "validation"):
            length = self._length(split)
            what = f"a {split} row of {length} tokens"
            reason = self.experiment.model.refuses_length(length, what)
            if reason is not None:
                raise UserError(reason)

    def _length(self, split: SplitName) -> int:
        training = self.experiment.training
        if split == "train":
            return training.row_length
        return self.dataset.evaluation_length(training.length)

    def _loader(self, split: SplitName) -> Loader | RowLoader | ChainedLoader:
        """Opens a split, which refuses one that is too short for a row."""
        experiment, train = self.experiment, split == "train"
        batch = experiment.training.batch if train else experiment.evaluation_batch
        return self.dataset.loader(
            split,
            length=self._length(split),
            batch=batch,
            rows=local_rows(batch, self.mesh),
        )

    def _carried(self, batches: Any) -> Any:
        """Cuts the training rows into the pieces of `training.carry` steps."""
        training = self.experiment.training
        if training.carry == 1:
            return batches
        first, _ = local_rows(training.batch, self.mesh)
        return CarriedBatches(batches, training.carry, first=first)


def _refuse_damaged_shards(experiment: Experiment) -> None:
    """Checks prepared data once per run: swapped shards of one size are other text.

    Shards in a store are left out: each is checked when it is fetched.
    """
    corpus = getattr(experiment.data, "corpus", None)
    mixture = isinstance(corpus, Mixture)
    corpora = [part.corpus for part in corpus.parts] if mixture else [corpus]
    for part in corpora:
        if isinstance(part, Prepared) and url_of(part.directory) is None:
            directory = Path(part.directory).expanduser()
            first_process(partial(verify_checksums, directory))


def _refuse_another_vocabulary(experiment: Experiment, dataset: AnyDataset) -> None:
    model = experiment.model
    if dataset.vocabulary == model.vocabulary:
        return
    fix = f"set --model.vocabulary {dataset.vocabulary}"
    # An imported checkpoint's tables have more rows than its tokenizer has tokens.
    if dataset.vocabulary < model.vocabulary:
        fix += (
            f", and --model.pad-vocabulary-to {model.padded_vocabulary} to keep the "
            f"tables' {model.padded_vocabulary} rows"
        )
    raise UserError(
        f"the tokenizer has {dataset.vocabulary} tokens and the model "
        f"{model.vocabulary}: {fix}"
    )


def _refuse_unusable_prompts(experiment: Experiment, tokenizer: Tokenizer) -> None:
    """Refuses before training what would stop the first evaluation."""
    evaluation = experiment.evaluation
    for prompt in evaluation.sample_prompts:
        length = len(tokenizer.encode(prompt)) + (tokenizer.bos is not None)
        if length == 0:
            raise UserError(
                "evaluation.sample_prompts has an empty prompt, and the tokenizer has "
                "no BOS token to start from: give it some text"
            )
        what = f"evaluation.sample_tokens {evaluation.sample_tokens} after {prompt!r} "
        reason = experiment.model.refuses_length(
            length + evaluation.sample_tokens - 1,
            what + f"({length} tokens)",
            fix="lower it",
        )
        if reason is not None:
            raise UserError(reason)


_WINDOW = ("spikes.losses", "spikes.known", "spikes.rejected")
"""What the spike rule compares with; its counts of updates always continue."""
