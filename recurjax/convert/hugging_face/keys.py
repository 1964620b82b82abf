"""A config.json read key by key: each is understood, known to be harmless, or wrong."""

from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.json_files import read_json_object

HARMLESS = {
    # What the weights are stored as, who wrote them, how to sample or initialise.
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("unk_token_id", "tokenizer_class", "is_decoder", "is_llama_config", "auto_map"),
    *("_attn_implementation", "transformers.js_config", "_commit_hash", "license"),
    # Without effect outside training; recurjax trains without dropout.
    *("attention_dropout", "hidden_dropout", "classifier_dropout"),
    # The same function in slices.
    "pretraining_tp",
}


class Keys:
    """Hands out the keys of a config.json and collects what is wrong with them."""

    def __init__(self, values: dict[str, Any], *, where: str):
        self._values = dict(values)
        self._where = where
        self._wrong: list[str] = []
        # Gone before anything is read, so that what is left over is what nobody knows.
        for key in HARMLESS:
            self._values.pop(key, None)

    def size(self, key: str, default: int | None = None) -> int:
        """Takes a positive whole number; null counts as absent."""
        # Old files write null where a key is not used.
        value = self._values.pop(key, None)
        value = default if value is None else value
        if value is None:
            self._wrong.append(f"{key} is missing")
            return 1
        # `type` and not isinstance: true would be a 1.
        if type(value) is not int or value < 1:
            self._wrong.append(f"{key} must be a positive number, got {value!r}")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        """Takes a number."""
        value = self._values.pop(key, default)
        if type(value) not in (int, float):
            self._wrong.append(f"{key} must be a number, got {value!r}")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Takes true or false."""
        value = self._values.pop(key, default)
        if type(value) is not bool:
            self._wrong.append(f"{key} must be true or false, got {value!r}")
            return default
        return value

    def word(self, key: str, choices: dict[str, Any], default: str) -> Any:
        """Takes one of a few words and returns what it stands for."""
        value = self._values.pop(key, None)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            self._wrong.append(f"{key} {value!r} is not supported ({_or(choices)})")
            value = default
        return choices[value]

    def only(self, key: str, *allowed: Any) -> None:
        """Takes a key that must be absent or have one of these values."""
        # Absent means the first value, which is what the architecture does by itself.
        value = self._values.pop(key, allowed[0])
        if value not in allowed:
            self._wrong.append(f"{key} {value!r} is not supported, only {allowed[0]!r}")

    def any(self, key: str) -> Any:
        """Takes a key whatever its value; None where it is absent."""
        return self._values.pop(key, None)

    def wrong(self, text: str) -> None:
        """Notes what else is wrong."""
        self._wrong.append(text)

    def finish(self) -> None:
        """Ends the reading.

        Raises:
          UserError: something was wrong, or keys are left that nobody understands.
        """
        # What is left was asked by nobody: it may change the function.
        self._wrong += [
            f"{key} {value!r} is not understood"
            for key, value in sorted(self._values.items())
        ]
        if self._wrong:
            raise UserError(f"{self._where}: {'; '.join(self._wrong)}")


def read_keys(file: Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    if not file.is_file():
        raise UserError(
            f"{file.parent} is not a checkpoint directory: it has no {file.name}"
        )
    return read_json_object(file, "the model's config")


def _or(choices: dict[str, Any]) -> str:
    return "known: " + ", ".join(choices)
