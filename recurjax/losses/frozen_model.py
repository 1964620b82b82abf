"""A trained model beside the one that is trained: what an objective compares with."""

from dataclasses import dataclass

from recurjax.model import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenModel:
    """A trained model that an objective reads and no step changes, such as a teacher.

    Its parameters are an argument of the step, lie on the mesh as the trained model's
    do, and are in no checkpoint.

    Attributes:
      run: the run directory whose newest good checkpoint has the parameters.
      model: its config: what a step is built from, so that planning reads no files.
    """

    run: str
    model: ModelConfig
