"""One self-contained PyTorch file from the templates in modules/.

A variant's template defines `build_layers(stack)` and `position_of(stack)`; layers.py
stands before it and decoder.py after it, and imports between them are dropped.
"""

import ast
from pathlib import Path

from recurjax.model import StackConfig
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.rat import RatConfig
from recurjax.variants.recurformer import RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.variants.transformer import TransformerConfig

TEMPLATES: dict[type, str] = {
    TransformerConfig: "transformer",
    RecurrentTransformerConfig: "recurrent_transformer",
    RatConfig: "rat",
    LatentRecurrentTransformerConfig: "latent_recurrent_transformer",
    RecurFormerConfig: "recurformer",
    RelaxedRecursiveTransformerConfig: "relaxed_recursive_transformer",
}
"""The template of each variant that can be exported."""

_FOLDER = Path(__file__).parent / "modules"
_LOCAL = ("layers", "variant")
HF_REFERENCE = _FOLDER / "hf_reference.py"
"""The script that runs a Hugging Face model in transformers."""


def torch_source(stack: StackConfig) -> str:
    """Joins the templates of a variant; what it does not use is left out.

    Raises:
      KeyError: the variant has no template.
    """
    # The order in the joined file: what is used before who uses it.
    names = ("layers", TEMPLATES[type(stack)], "decoder")
    texts = [(_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in names]
    return _joined(texts)


def _joined(texts: list[str]) -> str:
    plain: set[str] = set()
    from_modules: dict[str, set[str]] = {}
    bodies, docstrings = [], []
    for text in texts:
        lines = text.splitlines()
        tree = ast.parse(text)
        docstrings.append(ast.get_docstring(tree) or "")
        for node in tree.body:
            header = (
                isinstance(node, ast.Import | ast.ImportFrom) or node is tree.body[0]
            )
            if header:
                # Docstring and imports go; both come back once, at the head of the
                # file.
                assert node.end_lineno is not None
                lines[node.lineno - 1 : node.end_lineno] = [""] * (
                    node.end_lineno - node.lineno + 1
                )
            if isinstance(node, ast.Import):
                plain |= {ast.unparse(node)}
            elif isinstance(node, ast.ImportFrom) and node.module not in _LOCAL:
                # Imports of the same module from two templates become one.
                names = {alias.name for alias in node.names}
                from_modules.setdefault(str(node.module), set()).update(names)
        bodies.append("\n".join(lines).strip())
    head = "\n\n".join(
        ["Written by recurjax; needs Python >= 3.10, torch >= 2.2, safetensors, numpy."]
        + [docstrings[2], docstrings[1]]
    )
    imports = sorted(plain) + [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(from_modules.items())
    ]
    return "\n\n\n".join([f'"""{head}\n"""\n\n' + "\n".join(imports), *bodies]) + "\n"
