"""What stands beside a tokenizer.json: the chat template, and the model's own settings.

Both come with a pretrained model and go wherever its tokenizer goes: into a run, on to
another run that begins there, and out to where transformers reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """What a folder has beside its tokenizer.

    Attributes:
      template: the chat template's text; None: there is none. Of several by name it is
        the one called "default".
      generation: generation_config.json, kept as it is; None: there is none.
    """

    template: str | None = None
    generation: Mapping[str, Any] | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the tokens at which the model's texts end, by its own settings."""
        ids = (self.generation or {}).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        return tuple(token for token in ids if type(token) is int)

    def filled(self, other: "Companions") -> "Companions":
        """Returns these, with those of another folder where one is missing."""
        return Companions(
            template=other.template if self.template is None else self.template,
            generation=other.generation if self.generation is None else self.generation,
        )

    def save(self, directory: Path) -> None:
        """Writes the files that `read_companions` reads back."""
        if self.template is not None:
            write_atomic(directory / TEMPLATE_FILE, self.template)
        if self.generation is not None:
            text = json_text(self.generation, indent=2) + "\n"
            write_atomic(directory / GENERATION_FILE, text)


def read_companions(folder: Path) -> Companions:
    """Reads what a folder has.

    Raises:
      UserError: a file cannot be read, or is not what its name says.
    """
    generation = folder / GENERATION_FILE
    return Companions(
        template=_template(folder),
        generation=read_json_object(generation, "the model's settings")
        if generation.is_file()
        else None,
    )


def _template(folder: Path) -> str | None:
    # A file of its own is the newer way, and counts before the config's field.
    if (folder / TEMPLATE_FILE).is_file():
        return read_template(folder / TEMPLATE_FILE)
    if not (folder / CONFIG_FILE).is_file():
        return None
    value = read_json_object(folder / CONFIG_FILE, "the tokenizer's config")
    value = value.get("chat_template")
    if isinstance(value, list):
        named = {row.get("name"): row for row in value if isinstance(row, dict)}
        value = named.get("default", {}).get("template")
    return value if isinstance(value, str) else None


def read_template(file: Path) -> str:
    """Reads a chat template.

    Raises:
      UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {file}: {error}") from error
