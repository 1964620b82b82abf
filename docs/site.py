"""Builds the site: takes pages from where they are, and the reference from the code.

A hook of MkDocs (`mkdocs.yml`). The site has the repository's folders, so that links
between documents mean the same here and in a browser of the repository.
"""

import ast
import dataclasses
import io
import os
import re
import types
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from html import unescape
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from docstring_parser import parse as parse_docstring
from latex2mathml.converter import convert as to_mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REFERENCE = "docs/reference"
EXECUTED = ROOT / ".executed"
"""Where `make docs-notebooks` writes notebooks with their outputs."""
OPS = ("recurrent_prefill", "chunk_attention", "gated_scan", "selective_scan")
API = (
    "recurjax",
    "recurjax.convert",
    "recurjax.training.optimizers",
    *(f"pallas_kernels.{op}" for op in OPS),
)
"""Packages whose exported names the reference lists."""


def on_config(config: MkDocsConfig) -> None:
    """Lists the notebooks, the first tour first."""
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    names.sort(key=lambda name: name != "first_tour.ipynb")
    for section in config.nav or []:
        if "Notebooks" in section:
            section["Notebooks"] += [f"notebooks/{name}" for name in names]


@event_priority(100)  # before the plugin that takes the notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Gives every page its path in the repository, and adds the reference's pages."""
    docs = Path(config.docs_dir)
    pages = [file for file in files if file.src_dir != config.docs_dir]
    paths = [file for file in docs.rglob("*") if file.is_file()]
    paths += [ROOT / name for name in _pages_of(config.nav)]
    for path in sorted(set(paths)):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix != ".py":
            source = EXECUTED if (EXECUTED / name).is_file() else ROOT
            pages.append(
                File(name, str(source), config.site_dir, config.use_directory_urls)
            )
    os.environ["COLUMNS"] = "92"
    content = {
        "commands": _commands_page(),
        "config": _config_page(),
        "api": _api_page(),
        "errors": _errors_page(),
    }
    for name, text in content.items():
        page = f"{REFERENCE}/{name}.md"
        pages.append(File.generated(config, page, content=text))
    return Files(pages)


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: Any) -> str:
    """Turns GitHub's Markdown into what Python-Markdown reads."""
    here = Path(page.file.src_uri).parent

    def link(match: re.Match) -> str:
        text, target, anchor = match.groups()
        if ":" in target:
            return match[0]
        path = Path(os.path.normpath(here / target)).as_posix()
        readme = "README.md" if path == "." else f"{path}/README.md"
        if files.get_file_from_path(readme):
            return f"[{text}]({os.path.relpath(readme, here)}{anchor or ''})"
        if files.get_file_from_path(path) or not (ROOT / path).exists():
            return match[0]  # what does not exist is MkDocs' to report
        return text  # source code, which the site does not have

    parts = re.split(r"(?ms)(^ *```.*?^ *```$)", markdown)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = _PARAGRAPH_END.sub(r"\1\n\n", _LINK.sub(link, part))
        elif part.startswith("```math"):
            tex = part.removeprefix("```math").removesuffix("```").strip()
            parts[i] = f'<div class="math">{to_mathml(tex, display="block")}</div>'
    return "".join(parts)


_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)]*)?\)")
_PARAGRAPH_END = re.compile(r"(?m)^(?![-*|#>\s]|\d+\. )(.+)\n(?=(?:[-*] |1\. |\|))")
"""Text before a list or a table, where Python-Markdown wants an empty line."""


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Writes a notebook's formulas as MathML and drops its link to MathJax."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r"(?s)<script[^>]*(?:src=|mathjax).*?</script>", "", html)
    pieces = re.split(r"(?s)(<(?:pre|script|style)\b.*?</(?:pre|script|style)>)", html)
    for i in range(0, len(pieces), 2):
        pieces[i] = _FORMULA.sub(_notebook_formula, pieces[i])
    return "".join(pieces)


_FORMULA = re.compile(
    r"(?s)\$\$(?P<block>.+?)\$\$|(?<![\w$\\])\$(?=\S)(?P<inline>[^$<]+?)(?<=\S)\$(?!\w)"
)


def _notebook_formula(match: re.Match) -> str:
    display = "block" if match["block"] else "inline"
    return to_mathml(unescape(match["block"] or match["inline"]), display=display)


def _pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav:
        if not isinstance(nav, str):
            yield from _pages_of(item)


def _commands_page() -> str:
    """Shows what every command prints for --help."""
    from recurjax.cli.main import COMMANDS

    lines = ["# Commands", "", "What `recurjax COMMAND --help` prints.", ""]
    for name, summary in COMMANDS.items():
        usage = _help_of(name)
        lines += [f"## {name}", "", summary[0].upper() + summary[1:] + ".", ""]
        lines += ["```text", usage, "```", ""]
        parts = re.findall(rf"(?m)^ +recurjax {name} ([a-z-]+)\b", usage)
        for part in dict.fromkeys(parts):
            if text := _help_of(name, part):
                lines += [f"### {name} {part}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def _help_of(*command: str) -> str:
    from recurjax.cli.main import main

    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        main([*command, "--help"])
    return re.sub(r"\x1b\[[\d;]*m", "", output.getvalue()).strip()


def _config_page() -> str:
    """Lists the fields of every config that an experiment can hold."""
    from recurjax.experiment import Experiment

    lines = ["# Configs", ""]
    lines += [
        "An experiment is a frozen dataclass of these. Every field is an option of"
        " `recurjax train` by its dotted name: `--training.steps 500`.",
        "",
    ]
    for kind in _configs_in(Experiment, []):
        lines += [f"## {kind.__name__}", "", *_fields_of(kind), ""]
    return "\n".join(lines)


def _configs_in(hint: Any, seen: list[type]) -> list[type]:
    """Collects a config's class and those of its fields, in the order of reading."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in seen:
        seen.append(hint)
        for inner in get_type_hints(hint).values():
            _configs_in(inner, seen)
    for part in get_args(hint):
        _configs_in(part, seen)
    return seen


def _fields_of(kind: type) -> Iterator[str]:
    from recurjax.ranges import field_ranges

    docstring = parse_docstring(getdoc(kind) or "")
    meaning = {
        parameter.arg_name: parameter.description or ""
        for parameter in docstring.params
    }
    yield f"{docstring.short_description or ''} (`{kind.__module__}`)"
    yield ""
    hints, ranges = get_type_hints(kind), field_ranges(kind)
    if fields := dataclasses.fields(kind):
        yield "| field | type | range | default | meaning |"
        yield "|---|---|---|---|---|"
    for field in fields:
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        cells = (
            f"`{field.name}`",
            _linked(hints[field.name]),
            str(ranges.get(field.name, "")),
            "required" if default is dataclasses.MISSING else f"`{_short(default)}`",
            re.sub(
                r"([\[\]<])", r"\\\1", " ".join(meaning.get(field.name, "").split())
            ),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _short(default: Any) -> str:
    if dataclasses.is_dataclass(default):
        return f"{type(default).__name__}()"
    return repr(default)


def _linked(hint: Any) -> str:
    """Writes a type, its configs as links to their tables."""
    if isinstance(hint, types.UnionType) or str(get_origin(hint)) == "typing.Union":
        return " or ".join(_linked(part) for part in get_args(hint))
    if str(get_origin(hint)) == "typing.Literal":
        return ", ".join(f"`{value!r}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        inner = [part for part in get_args(hint) if part is not ...]
        return "tuple of " + ", ".join(map(_linked, inner))
    name = "None" if hint is types.NoneType else getattr(hint, "__name__", str(hint))
    if dataclasses.is_dataclass(hint):
        return f"[{name}](#{name.lower()})"
    return name


def _api_page() -> str:
    """Names every exported function and class; mkdocstrings fills it in."""
    lines = ["# Python API", ""]
    lines += ["Letters in shapes are those of `recurjax/types.py`: `B` rows, `T` query"]
    lines += ["positions, `S` key positions, `D` model width, `H` query heads, `K` key"]
    lines += ["heads, `E` head width, `V` vocabulary, `L` layers.", ""]
    for package in API:
        lines += [f"## {package}", ""]
        for name in import_module(package).__all__:
            if not name.startswith("__"):
                lines += [f"::: {package}.{name}", ""]
    return "\n".join(lines)


def _errors_page() -> str:
    """Lists the sentences that the code raises, by module."""
    lines = ["# Errors", ""]
    lines += [
        "`UserError` and `ValueError`: what was passed does not fit, and the sentence"
        " names the option or argument. `NotImplementedError`: a valid request that is"
        " not available here. Words in braces are filled in.",
        "",
    ]
    for path in sorted((ROOT / "recurjax").rglob("*.py")):
        rows = sorted(set(_raised_in(ast.parse(path.read_text()))))
        if rows:
            lines += [f"## {path.relative_to(ROOT).as_posix()}", ""]
            lines += ["| error | sentence |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _raised_in(tree: ast.Module) -> Iterator[str]:
    kinds = ("UserError", "ValueError", "NotImplementedError")
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name, arguments = ast.unparse(node.exc.func), node.exc.args
            if name in kinds and arguments and _is_text(arguments[0]):
                text = ast.unparse(arguments[0]).removeprefix("f")[1:-1]
                text = " ".join(_FORMAT.sub("}", text).replace("\\n", " ").split())
                yield f"| {name} | {_MARKUP.sub(_escaped, text)} |"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)


_FORMAT = re.compile(r"(?:![rsa])?(?::[,.\d%a-z]*)?\}")
_MARKUP = re.compile(r"[|*_<>`\\\[\]{}]")


def _escaped(match: re.Match) -> str:
    return f"\\{match[0]}"
