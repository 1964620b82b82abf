"""Texts in a file of JSON lines as they come: a killed run goes on where it stopped."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recurjax.errors import UserError
from recurjax.files.json_files import json_text, parse_json

_FIELDS = {"number": int, "prompt": str, "text": str, "tokens": list}
_FIELDS |= {"finish_reason": str, "settings": str}


class JsonLinesWriter:
    """One line a prompt, in the order in which their texts end.

    Attributes:
      done: lines by the number of their prompt, from 0.
    """

    def __init__(self, file: Path, prompts: Sequence[str], settings: Mapping[str, Any]):
        """Reads what an earlier run has left; a last line that a kill cut off goes.

        Args:
          settings: what decides a text beside its prompt.

        Raises:
          UserError: the file holds something else, or texts of other settings.
        """
        self._file = file
        # A digest stands in every line, so that texts of two settings never mix.
        text = json.dumps(settings, sort_keys=True).encode()
        self._settings = hashlib.sha256(text).hexdigest()[:16]
        self.done: dict[int, dict[str, Any]] = {}
        try:
            data = file.read_bytes() if file.exists() else b""
            # A line without its end was cut off by a kill: its text is made anew.
            whole = data[: data.rfind(b"\n") + 1]
            for row, line in enumerate(whole.splitlines(), start=1):
                self._remember(line, f"line {row} of {file}", prompts)
            if data != whole:
                with file.open("r+b") as opened:
                    opened.truncate(len(whole))
            file.open("ab").close()  # Told now if it cannot be written, not after work.
        except OSError as error:
            raise UserError(f"cannot write texts to {file}: {error}") from error

    def add(self, number: int, line: Mapping[str, Any]) -> None:
        """Writes a prompt's line."""
        line = {"number": number, **line, "settings": self._settings}
        self.done[number] = line
        # Opened and closed for each line, so that a kill finds it with the system.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json_text(line, ensure_ascii=False) + "\n")

    def _remember(self, data: bytes, where: str, prompts: Sequence[str]) -> None:
        line = parse_json(data, where)
        kinds = line if isinstance(line, dict) else {}
        if any(type(kinds.get(name)) is not kind for name, kind in _FIELDS.items()):
            raise UserError(f"{where} is no text of an earlier run: name another file")
        number = line["number"]
        if line["settings"] != self._settings:
            raise UserError(
                f"{where} was made with other settings or another checkpoint: name "
                "another file, or use the same again"
            )
        if not 0 <= number < len(prompts) or prompts[number] != line["prompt"]:
            raise UserError(
                f"{where} continues another prompt than number {number + 1} of these: "
                "name another file, or give the same prompts again"
            )
        self.done[number] = line
