"""The rules of code that a syntax tree can show."""

import ast

import pytest

from tests.source_tree import ROOT, imported_by, modules, tree_of

MOST_SIBLINGS = 5
"""Modules of its own folder that a module may import: a reader of more has to hold the
entire folder in mind, so that two of its files belong together."""
MANY_SIBLINGS = {
    "recurjax.data.tasks.dataset": "its table names every task",
    "recurjax.data.tokenizers.loading": "it opens every kind of tokenizer",
    "recurjax.data.dataset": "it joins the stages of the pipeline",
    "recurjax.data.loader": "it joins the stages of the pipeline",
    "recurjax.data.answers": "it joins the stages of the pipeline, for chats",
    "recurjax.inference.engine.engine": "the loop around slots, programs and requests",
    "recurjax.serving.app": "its table names every route",
}
"""Modules that import more, and why."""
MOST_MODULES = 12
"""Modules in a folder, its door aside, that a reader can tell apart by name."""
MANY_MODULES = {
    "pallas_kernels": "what all ops share, one idea each",
    "pallas_kernels.chunk_attention": "three backends of two passes each",
    "pallas_kernels.gated_scan": "three backends of two passes each",
    "recurjax": "what all parts read, and the helpers of notebooks",
    "recurjax.bench": "one module a variant, one an op",
    "recurjax.evaluation": "one module a kind of evaluation",
}
"""Folders that hold more, and why."""
READERS = {
    "recurjax.bench.torch_peer": "the answer of its own process",
    "recurjax.convert.parity": "the answer of its own process",
    "recurjax.convert.torch.modules.decoder": "PyTorch's side: no recurjax",
    "recurjax.convert.torch.modules.hf_reference": "PyTorch's side, likewise",
    "recurjax.data.chat.process": "the answer of its own process",
    "recurjax.data.corpora.documents": "half characters become U+FFFD in corpora",
    "recurjax.data.prepared.directory": "a copy of its own values",
    "recurjax.data.chat.program": "the request of the process that started it",
    "recurjax.machine.process_group": "messages of its own processes",
    "recurjax.plan.child": "the request of the process that started it",
    "recurjax.plan.compilers": "the answer of its own process",
    "recurjax.training.agreement": "messages of its own processes",
    "recurjax.training.checkpoint.checkpoints": "messages of its own processes",
    "recurjax.training.checkpoint.manifest": "a copy of its own values",
    "recurjax.training.run.run_directory": "messages of its own processes",
}
"""Modules outside of `recurjax.files` that parse JSON or arrays themselves, and why."""
TWINS = "recurjax.convert.torch.modules."
"""PyTorch's templates: each class is the twin of ours and has its name."""
FORBIDDEN_NAMES = ("utils", "util", "common", "helpers", "helper", "_lib", "misc")
# jax's own serve modules; NNX's copy state in and out behind the reader's back.
NNX_TRANSFORMS = {
    *("jit", "grad", "value_and_grad", "scan", "vmap", "pmap", "remat", "checkpoint"),
    *("cond", "while_loop", "fori_loop", "shard_map", "custom_vjp", "vjp", "jvp"),
}
MUTABLE_STATE = {"Rngs", "Dropout", "BatchNorm", "Variable", "Cache", "BatchStat"}


def mutations(tree: ast.Module) -> list[str]:
    """Returns where a module or a Param is changed after it was made."""
    matches = []
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef) and is_module(owner):
            for function in owner.body:
                if (
                    isinstance(function, ast.FunctionDef)
                    and function.name != "__init__"
                ):
                    matches += [
                        f"line {target.lineno}: {ast.unparse(target)} = ... "
                        f"in {owner.name}.{function.name}"
                        for target in targets(function)
                        if isinstance(target, ast.Attribute)
                        and ast.unparse(target).startswith("self.")
                    ]
    matches += [
        f"line {target.lineno}: {ast.unparse(target)} = ..."
        for target in targets(tree)
        if isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value is ...
    ]
    return matches


def is_module(owner: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).partition("[")[0] for base in owner.bases]
    return any(base.endswith(("Module", "UncutStack")) for base in bases)


def targets(tree: ast.AST) -> list[ast.expr]:
    """Returns what a tree assigns to or deletes; tuples are taken apart."""
    matches: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            matches += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            matches.append(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            matches.append(ast.Attribute(node.args[0], "setattr", lineno=node.lineno))
    parts = []
    while matches:
        target = matches.pop()
        if isinstance(target, ast.Tuple | ast.List):
            matches += target.elts
        else:
            parts.append(target.value if isinstance(target, ast.Starred) else target)
    return parts


def nnx_transforms(tree: ast.Module) -> list[str]:
    """Returns uses of NNX's own transformations."""
    return [
        f"line {node.lineno}: nnx.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).split(".")[-1] == "nnx"
        and node.attr in NNX_TRANSFORMS
    ]


def kept_state(tree: ast.Module) -> list[str]:
    """Returns where `__init__` keeps a key, a dropout or a mutable Variable."""
    matches = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            value = ast.unparse(node.value)
            state = any(f"nnx.{name}(" in value for name in MUTABLE_STATE)
            on_self = any(ast.unparse(t).startswith("self.") for t in node.targets)
            if on_self and (state or value in ("rngs", "key")):
                matches.append(f"line {node.lineno}: {ast.unparse(node)}")
    return matches


def loose_configs(tree: ast.Module) -> list[str]:
    """Returns the configs that are not frozen, keyword-only and slotted.

    That of transformers is its own: the PyTorch export has a class of it.
    """
    matches = []
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef) and owner.name.endswith("Config"):
            if "PretrainedConfig" in map(ast.unparse, owner.bases):
                continue
            decorators = [ast.unparse(line) for line in owner.decorator_list]
            wanted = ("frozen=True", "kw_only=True", "slots=True")
            if not any(all(word in line for word in wanted) for line in decorators):
                matches.append(f"line {owner.lineno}: {owner.name}")
    return matches


def untyped_stacks(tree: ast.Module) -> list[str]:
    """Returns what asks a stack for something that no protocol declares.

    A name or an attribute `stack` is one, and so is a `mixer`: a layer's config.
    """
    matches = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[asked, *_]):
                bad = is_stack(asked)
            case ast.AnnAssign(target=target, annotation=annotation, value=value):
                built = value is not None and "make_stack(" in ast.unparse(value)
                bad = is_any(annotation) and (
                    is_stack(target) or is_stack(value) or built
                )
            case ast.arg(arg="stack" | "mixer", annotation=annotation):
                bad = is_any(annotation)
            case ast.Call(func=ast.Name(id="cast"), args=[wanted, value]):
                bad = is_any(wanted) and is_stack(value)
            case _:
                bad = False
        if bad and isinstance(node, ast.expr | ast.stmt | ast.arg):
            matches.append(f"line {node.lineno}: {ast.unparse(node)}")
    return matches


def is_stack(node: ast.AST | None) -> bool:
    return node is not None and ast.unparse(node).split(".")[-1] in ("stack", "mixer")


def is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("Any", "object")


def folder_of(module: str) -> str:
    return module.rpartition(".")[0]


def siblings(module: str, imported: set[str]) -> set[str]:
    """Returns the modules of its own folder among those that a module imports."""
    return {name for name in imported if folder_of(name) == folder_of(module)}


def crowded(sizes: dict[str, int], most: int, excepted: dict[str, str]) -> list[str]:
    """Returns what is larger than allowed, exceptions aside."""
    return [
        f"{name}: {size}"
        for name, size in sorted(sizes.items())
        if size > most and name not in excepted
    ]


def import_counts() -> dict[str, int]:
    """Returns how many modules of its own folder each module imports, doors aside."""
    known = set(modules())
    doors = {folder_of(name) for name in known}
    return {
        name: len(siblings(name, imported_by(tree_of(path), known)))
        for name, path in modules().items()
        if name not in doors
    }


def module_counts() -> dict[str, int]:
    """Returns how many modules each folder holds, its door aside."""
    doors = {folder_of(name) for name in modules()}
    inside = [folder_of(name) for name in set(modules()) - doors]
    return {folder: inside.count(folder) for folder in set(inside)}


def test_a_file_is_understood_without_its_neighbours():
    """What needs many files of its folder is one idea that was cut: merge them."""
    assert crowded(import_counts(), MOST_SIBLINGS, MANY_SIBLINGS) == []


def test_a_folder_holds_about_a_dozen_modules():
    """A reader tells more of them apart in subfolders, each with a door."""
    assert crowded(module_counts(), MOST_MODULES, MANY_MODULES) == []


def repeated_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Returns class name -> the modules that define it, where there are several."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return {name: result for name, result in homes.items() if len(result) > 1}


def test_a_class_name_means_one_thing():
    """`TWINS` aside; in pallas_kernels a backend's classes are its own."""
    trees = {
        name: tree_of(path)
        for name, path in modules().items()
        if name.startswith("recurjax.") and not name.startswith(TWINS)
    }
    assert repeated_classes(trees) == {}


def test_a_repeated_class_is_seen():
    trees = {"a": ast.parse("class C: pass"), "b": ast.parse("def f():\n class C: 1")}
    assert repeated_classes(trees) == {"C": ["a", "b"]}


def test_a_crowd_is_seen():
    assert siblings("a.b.c", {"a.b.d", "a.b", "a.b.e.f", "a.d"}) == {"a.b.d"}
    assert crowded({"a": 3, "b": 2}, 2, {}) == ["a: 3"]
    assert crowded({"a": 3, "b": 2}, 2, {"a": "why"}) == []


@pytest.mark.parametrize(
    "check",
    [mutations, nnx_transforms, kept_state, loose_configs, untyped_stacks],
    ids=lambda f: f.__name__,
)
def test_no_file_breaks_the_rule(check):
    result = {name: check(tree_of(path)) for name, path in modules().items()}
    assert {name: lines for name, lines in result.items() if lines} == {}


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (mutations, "class A(nnx.Module):\n def f(self): self.w = 1"),
        (mutations, "class A(nnx.Module):\n def f(self): self.a.w += 1"),
        (mutations, "class A(Rows, UncutStack[B]):\n def f(self): self.w = 1"),
        (mutations, "class A(nnx.Module):\n def f(self): x, self.w = 1, 2"),
        (mutations, "class A(nnx.Module):\n def f(self): setattr(self, 'w', 1)"),
        (mutations, "class A(nnx.Module):\n def f(self): self.w[...] = 1"),
        (mutations, "def f(m): m.w[...] *= 2"),
        (nnx_transforms, "nnx.jit(f)"),
        (nnx_transforms, "flax.nnx.scan(f)"),
        (kept_state, "self.rngs = rngs"),
        (kept_state, "self.drop = nnx.Dropout(0.1)"),
        (loose_configs, "@dataclass(frozen=True)\nclass AConfig: pass"),
        (untyped_stacks, "getattr(model.stack, 'exits', 1)"),
        (untyped_stacks, "if hasattr(stack, 'schedule'): pass"),
        (untyped_stacks, "stack: Any = model.stack"),
        (untyped_stacks, "s: Any = model.config.stack"),
        (untyped_stacks, "blocks: Any = make_stack(config, rngs=rngs)"),
        (untyped_stacks, "class Parts(NamedTuple):\n stack: Any"),
        (untyped_stacks, "def f(stack: Any): pass"),
        (untyped_stacks, "cast(Any, model.stack).exits"),
    ],
)
def test_a_broken_rule_is_seen(check, code):
    assert len(check(ast.parse(code))) == 1


def bare_readers(tree: ast.Module) -> list[str]:
    """Returns where JSON or arrays are read without a sentence for what is wrong."""
    forbidden = {"json.load", "json.loads", "np.load", "numpy.load"}
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in forbidden
    ]


def test_files_from_outside_are_read_by_one_reader():
    """`recurjax.files` bounds what a file may claim, and names it in what it says."""
    found = {
        name
        for name, path in modules().items()
        if name.startswith("recurjax.")
        and not name.startswith("recurjax.files.")
        and bare_readers(tree_of(path))
    }
    assert found - READERS.keys() == set(), "use json_files or arrays of recurjax.files"
    assert READERS.keys() - found == set(), "these no longer need an exception"


def test_assignments_in_init_are_allowed():
    tree = ast.parse("class A(nnx.Module):\n def __init__(self): self.w = 1")
    assert mutations(tree) == []


def test_every_file_names_its_idea():
    for name, path in modules().items():
        assert path.stem not in FORBIDDEN_NAMES, f"{name}: name the idea"


def test_every_file_that_does_something_says_what():
    for name, path in modules().items():
        tree = tree_of(path)
        assert not tree.body or ast.get_docstring(tree), name


def test_every_folder_of_tests_is_a_package():
    """Two files of one name in folders that are not packages stop the collection."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert [
        item for item in sorted(folders) if not (item / "__init__.py").is_file()
    ] == []


def test_the_command_that_has_pytorch_runs_every_file_that_needs_it():
    """`make test-torch` names its files: elsewhere their tests skip."""
    marked = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.torch" in file.read_text(encoding="utf-8")
        and file.name != "test_style.py"
    }
    listed = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = listed.partition("TORCH_TESTS := ")[2].partition("TORCH_PYTHON")[0]
    assert set(listed.replace("\\", " ").split()) == marked
