"""Starts the process that renders chat templates, sends it work, and ends it."""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from recurjax.data.chat import program
from recurjax.errors import UserError


class TemplateProcess:
    """Renders chat templates in a process with limits: see `program`.

    It starts with the first template, ends with this process, and starts again after a
    template that went over a limit.
    """

    def __init__(
        self, *, seconds: int = 5, memory: int = 2**30, characters: int = 2**25
    ):
        """Sets the limits.

        Args:
          seconds: seconds of processor time that a template may take.
          memory: bytes of address space that the process may have.
          characters: characters that a rendered text may have.
        """
        self._seconds = seconds
        self._limits = (seconds, memory, characters)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a forked process has a child of its own
        atexit.register(self.close)

    def render(
        self,
        source: str,
        values: Sequence[Mapping[str, Any]] = (),
        *,
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Compiles a template and renders it once for each of `values`, its variables.

        Args:
          source: the template.
          values: as JSON may hold them.
          marks: private characters that stand for names in the values' texts; where the
            template looks for such a name, it finds them.

        Raises:
          UserError: the template does not compile, refuses, fails or goes over a limit.
        """
        request = {"source": source, "values": list(values), "marks": dict(marks)}
        try:
            data = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                "the messages or options do not fit into JSON, which the chat "
                f"template reads: {error}"
            ) from error
        with self._lock:
            try:
                answer = json.loads(self._answer(data))
            except BaseException:
                # Half an answer is not a place to continue from.
                self._end()
                raise
        for outcome in ("refuses", "does not compile", "fails"):
            if outcome in answer:
                raise UserError(f"the chat template {outcome}: {answer[outcome]}")
        return answer["texts"]

    def close(self) -> None:
        """Ends the process; a later template starts another one."""
        with self._lock:
            self._end()

    def _answer(self, data: bytes) -> bytes:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says that it died
            process.stdin.write(len(data).to_bytes(8, "big") + data)
            process.stdin.flush()
        size = process.stdout.read(8)
        answer = process.stdout.read(int.from_bytes(size, "big"))
        if len(size) == 8 and answer:
            return answer
        code = process.wait()
        if code == -signal.SIGXCPU:
            reason = f"it takes more than {self._seconds} s of processor time"
        else:
            reason = f"the process that renders it ended with exit code {code}"
        raise UserError(f"the chat template fails: {reason}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid():
            return self._process
        if importlib.util.find_spec("jinja2") is None:
            raise UserError("chat templates need jinja2: pip install 'recurjax[serve]'")
        command = [sys.executable, "-P", program.__file__]
        self._process = subprocess.Popen(
            [*command, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The child imports the same packages as this process.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            # Ctrl-C is for this process, which ends the other.
            start_new_session=True,
        )
        self._owner = os.getpid()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        # Closes the pipes too, and waits.
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
