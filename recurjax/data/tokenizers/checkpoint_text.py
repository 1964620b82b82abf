"""A checkpoint's settings about text, from every file that can have them.

A Hugging Face folder spreads these facts over several files, and a GGUF file keeps them
in its metadata. Prompts, chats, training, serving, evaluation and export all use what
this module reads. The first source that states a fact decides:

| fact | sources, in order |
|---|---|
| names of BOS, EOS, pad, unk | the caller; special_tokens_map.json where |
|   | tokenizer_config.json has no added_tokens_decoder; tokenizer_config.json; |
|   | bos_token_id and eos_token_id of generation_config.json, then of config.json; |
|   | a well-known name in the vocabulary |
| tokens that texts begin and end with | the caller; the post-processor of |
|   | tokenizer.json (add_bos_token and add_eos_token count without such a file only, |
|   | as in transformers 5) |
| further tokens and their flags | tokenizer.json; added_tokens_decoder |
| tokens that end an answer | EOS, with eos_token_id of generation_config.json, else |
|   | of config.json |
| chat template | chat_template.jinja; chat_template of tokenizer_config.json |
| sampling defaults | generation_config.json |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_MODEL_FILE = "config.json"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """A token that tokenizer_config.json adds to those of tokenizer.json.

    Attributes:
      id: its place in the vocabulary.
      content: its text.
      flags: single_word, lstrip, rstrip, normalized and special, those that are stated.
    """

    id: int
    content: str
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """A checkpoint's settings about text beyond its tokenizer.json.

    Attributes:
      names: the stated special tokens by role (bos_token, eos_token, pad_token,
        unk_token); None states that there is no such token.
      ids: bos_token_id and eos_token_id as the model's own config states them, for
        roles that `names` does not have.
      added: tokens that tokenizer.json may lack.
      template: the chat template's text, the one called "default" of several; None:
        there is none.
      generation: the values of generation_config.json, unchanged; None: there is none.
      model_ends: eos_token_id of config.json, which counts where `generation` does not
        state it.
      bos_by_name: BOS begins texts although tokenizer.json does not say so. Folders
        that recurjax saved up to version 0.1 have the names of special tokens only, in
        the layout of `write_tokenizer_config`, and their models were trained so.
    """

    names: Mapping[str, str | None] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    added: tuple[AddedToken, ...] = ()
    template: str | None = None
    generation: Mapping[str, Any] | None = None
    model_ends: tuple[int, ...] = ()
    bos_by_name: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the tokens that end the model's answers by its own settings."""
        return _end_ids(self.generation or {}) or self.model_ends

    @property
    def sampling(self) -> dict[str, float | int]:
        """Returns the model's own sampling defaults, by the names of `SamplingConfig`.

        `do_sample: false` is temperature 0. Values that filter nothing (top_k 0) are
        left out.
        """
        generation = self.generation or {}
        defaults: dict[str, float | int] = {}
        for name in _SAMPLING:
            value = generation.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name == "top_k" and value < 1:
                continue
            defaults[name] = int(value) if name == "top_k" else float(value)
        if generation.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return defaults

    def filled(self, other: "TextSettings") -> "TextSettings":
        """Returns the settings of a tokenizer that fits the model of another folder.

        The model's template and generation count where the tokenizer came without.
        """
        return replace(
            self,
            template=other.template if self.template is None else self.template,
            generation=other.generation if self.generation is None else self.generation,
            model_ends=other.model_ends or self.model_ends,
        )

    def save(self, directory: Path) -> None:
        """Writes the template and generation_config.json, those that there are."""
        if self.template is not None:
            write_atomic(directory / TEMPLATE_FILE, self.template)
        generation = self.generation
        if generation is None and self.model_ends:
            generation = {"eos_token_id": list(self.model_ends)}
        if generation is not None:
            text = json_text(generation, indent=2) + "\n"
            write_atomic(directory / GENERATION_FILE, text)


def read_text_settings(folder: Path) -> TextSettings:
    """Reads what the files of a folder say; a missing file says nothing.

    Raises:
      UserError: a file cannot be read, or does not hold what its name promises.
    """
    config_file = folder / CONFIG_FILE
    config = _object(config_file, "the tokenizer's config")
    model = _object(folder / _MODEL_FILE, "the model's config")
    file = folder / GENERATION_FILE
    generation = (
        read_json_object(file, "the model's settings") if file.is_file() else None
    )
    names = _names(config, config_file)
    if "added_tokens_decoder" not in config:
        values = _object(folder / _MAP_FILE, "the special tokens")
        names |= _names(values, folder / _MAP_FILE)
    return TextSettings(
        names=names,
        ids=_stated_ids({**model, **(generation or {})}),
        added=_added(config.get("added_tokens_decoder") or {}, config_file),
        template=_template(folder, config),
        generation=generation,
        model_ends=_end_ids(model),
        bos_by_name=set(config) <= set(_ROLES)
        and config_file.is_file()
        and config_file.read_text(encoding="utf-8") == _config_text(config),
    )


def read_template(file: Path) -> str:
    """Reads a chat template.

    Raises:
      UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {file}: {error}") from error


def write_tokenizer_config(
    folder: Path, names: Mapping[str, str | None], *, bos_by_name: bool = False
) -> None:
    """Writes the names of special tokens where `read_text_settings` finds them.

    Args:
      bos_by_name: see `TextSettings`.
    """
    # transformers asks this file which class reads tokenizer.json, and what a model
    # takes of it: types of tokens, which it makes by default, few do.
    reader = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    reader = {} if bos_by_name else reader
    write_atomic(folder / CONFIG_FILE, _config_text({**names, **reader}))


def _config_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1) + "\n"


def _object(file: Path, what: str) -> dict[str, Any]:
    return read_json_object(file, what) if file.is_file() else {}


def _names(values: Mapping[str, Any], file: Path) -> dict[str, str | None]:
    names: dict[str, str | None] = {}
    for role in _ROLES:
        if role in values:
            value = values[role]
            value = value.get("content", 0) if isinstance(value, dict) else value
            if not isinstance(value, str | None):
                raise UserError(
                    f"{file}: {role} must be a token's name or null, got "
                    f"{values[role]!r}"
                )
            names[role] = value
    return names


def _end_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    ends = values.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(token for token in ends if type(token) is int)


def _stated_ids(values: Mapping[str, Any]) -> dict[str, int]:
    ids = {}
    for role in ("bos_token", "eos_token"):
        value = values.get(f"{role}_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value >= 0:
            ids[role] = value
    return ids


def _added(rows: Any, file: Path) -> tuple[AddedToken, ...]:
    good = isinstance(rows, dict) and all(
        number.isdecimal()
        and isinstance(row, dict)
        and isinstance(row.get("content"), str)
        and all(isinstance(row.get(flag, False), bool) for flag in _FLAGS)
        for number, row in rows.items()
    )
    if not good:
        raise UserError(
            f"{file}: added_tokens_decoder must map token ids to objects with "
            "a content and flags of true or false"
        )
    return tuple(
        AddedToken(
            id=int(number),
            content=row["content"],
            flags={flag: row[flag] for flag in _FLAGS if flag in row},
        )
        for number, row in sorted(rows.items(), key=lambda item: int(item[0]))
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    # A file of its own is the newer way, and counts before the config's field.
    if (folder / TEMPLATE_FILE).is_file():
        return read_template(folder / TEMPLATE_FILE)
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {row.get("name"): row for row in value if isinstance(row, dict)}
        value = named.get("default", {}).get("template")
    return value if isinstance(value, str) else None
