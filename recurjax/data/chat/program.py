"""The program that renders chat templates, in a process of its own with limits.

A template comes with a model and is a program: jinja2's sandbox keeps it from files and
from Python's inside, but it may loop forever or fill the memory, in one call of a C
function that nothing in Python interrupts. So the operating system limits this process.
`recurjax.data.chat` starts it as a script and restarts it when it dies.

Requests come from standard input and answers go to standard output, each a JSON object
after its length in eight bytes. Imports jinja2 and the standard library only.
"""

import datetime
import functools
import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

OPENED, CLOSED = "\U0010fffb", "\U0010fffc"
"""Private use: stand around what the model generates, by the template's own marks."""
LONGEST_MESSAGE = 500
"""Characters of an error that are passed on: a template may choose them."""


def main(seconds: int, memory: int, characters: int) -> None:
    """Answers requests until standard input ends.

    Args:
      seconds: seconds of processor time that a request may take.
      memory: bytes of address space that the process may have.
      characters: characters that a rendered text may have.
    """
    _environment()  # imports jinja2, before files can no longer be written
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_AS, memory)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(size := requests.read(8)) == 8:
        data = requests.read(int.from_bytes(size, "big"))
        used = resource.getrusage(resource.RUSAGE_SELF)
        total = used.ru_utime + used.ru_stime
        # The kernel counts in seconds and kills the process at the limit.
        _limit(resource.RLIMIT_CPU, int(total) + seconds + 1)
        answer = _answer(data, characters)
        answers.write(len(answer).to_bytes(8, "big") + answer)
        answers.flush()


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    try:
        resource.setrlimit(kind, (value, hard))
    except (OSError, ValueError):  # a system without this limit: macOS' memory
        return


def _answer(data: bytes, characters: int) -> bytes:
    try:
        answer = _texts(json.loads(data), characters)
        return json.dumps(answer).encode()
    except MemoryError:
        return b'{"fails": "it fills the memory that a template may take"}'


def _texts(request: dict[str, Any], characters: int) -> dict[str, Any]:
    """Compiles a template and renders it; returns its texts or what went wrong."""
    doing = "does not compile"
    try:
        template = _compiled(request["source"])
        doing = "fails"
        kind = _Hidden.names_hidden(request["marks"])
        texts = [template.render(**_typed(v, kind)) for v in request["values"]]
    except _Refused as error:
        return {"refuses": _sentence(error)}
    except RecursionError:
        return {doing: "it is nested too deeply, or calls itself without end"}
    except MemoryError:
        raise
    except Exception as error:
        return {doing: _sentence(error)}
    if any(len(text) > characters for text in texts):
        return {"fails": f"it writes more than {characters:,} characters"}
    return {"texts": texts}


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:LONGEST_MESSAGE]
    return text or type(error).__name__


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


class _Hidden(str):
    """A text in which private characters stand for names that somebody typed.

    A template that looks for such a name, to cut a model's thoughts from its answer
    say, finds it: what it looks for is written in the same way.
    """

    hide: Callable[[str], str]

    @classmethod
    def names_hidden(cls, marks: Mapping[str, str]) -> type["_Hidden"]:
        """Returns the class of texts with these names in other characters."""

        def hide(text: str) -> str:
            for name, mark in marks.items():
                text = text.replace(name, mark)
            return text

        members = {"hide": staticmethod(hide)}
        return type("_Hidden", (cls,), members) if marks else cls

    def __str__(self) -> str:
        return self  # jinja2's filters ask for it


def _seeking(name: str, sought: int) -> Callable[..., Any]:
    """Returns a method of `str` whose first arguments are texts that it looks for."""
    method = getattr(str, name)

    def call(self: _Hidden, *arguments: Any, **named: Any) -> Any:
        hidden = [_hidden(value, self) for value in arguments[:sought]]
        result = method(self, *hidden, *arguments[sought:], **named)
        return _typed(result, type(self))

    return call


_SEEKING = (
    *("count", "find", "index", "rfind", "rindex", "startswith", "endswith"),
    *("partition", "rpartition", "split", "rsplit", "__contains__", "replace"),
    *("removeprefix", "removesuffix"),
)
for _name in _SEEKING:
    setattr(_Hidden, _name, _seeking(_name, 1))
for _name in ("strip", "lstrip", "rstrip", "splitlines", "__getitem__"):
    setattr(_Hidden, _name, _seeking(_name, 0))


def _hidden(value: Any, text: _Hidden) -> Any:
    if isinstance(value, tuple):
        return tuple(_hidden(part, text) for part in value)
    return type(text).hide(value) if isinstance(value, str) else value


def _typed(value: Any, kind: type[_Hidden]) -> Any:
    """Returns a value whose strings are of a class; `_Hidden` itself hides nothing."""
    if kind is _Hidden:
        return value
    if isinstance(value, str):
        return kind(value)
    if isinstance(value, dict):
        return {key: _typed(item, kind) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_typed(item, kind) for item in value)
    return value


class _Refused(Exception):
    """A template called raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML and sorts keys.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> Any:
    """Returns jinja2 as transformers sets it up, for which templates are written."""
    from jinja2 import nodes  # pyright: ignore[reportMissingImports]
    from jinja2.ext import Extension  # pyright: ignore[reportMissingImports]
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]

    class GenerationBlock(Extension):
        """`{% generation %}` ... `{% endgeneration %}`: what the model generates."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPENED}{caller()}{CLOSED}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
