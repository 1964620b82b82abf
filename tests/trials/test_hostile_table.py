"""The table of hostile inputs grows by law: what reads is in a room or has a reason.

A function that opens a file, a URL or a socket, a command and a field of a request that
are new fail a test here until a room of `hostile_inputs.py` spoils what they read.
"""

import ast

from recurjax.cli.main import COMMANDS
from recurjax.serving.bodies import CHAT_FIELDS, COMPLETION_FIELDS
from tests.source_tree import ROOT, modules, tree_of
from tests.trials.hostile_inputs import BODIES, DEVICE_ROOMS, HOST_ROOMS, application

ROOMS = HOST_ROOMS | DEVICE_ROOMS
READS = {
    *("open", "read_text", "read_bytes", "read_json", "read_json_object", "fdopen"),
    *("read_array", "read_arrays", "load", "loads", "memmap", "fromfile", "safe_open"),
    *("ParquetFile", "ZipFile", "urlopen", "socket", "create_connection"),
    *("snapshot_download", "hf_hub_download", "HfFileSystem", "filesystem"),
    *("open_store", "get_file", "cat_file", "read_header"),
}
"""Names of calls that open something."""

IN_ROOMS = {
    "talk": ["cli.chat:ChatSession.load"],
    "chat": ["cli.chat:_Terminal._obey", "cli.chat:run"],
    "surgery": ["cli.convert.surgery:cut_text"],
    "heads": ["cli.convert.surgery:read_heads"],
    "texts": ["cli.generate:_TextLines.__init__", "cli.generate:_TextLines.add"],
    "prompts": ["cli.generate:_read_prompts"],
    "card": ["cli.push.card:run"],
    "key": ["cli.serve:_read_key"],
    "gguf": [
        "convert.formats.gguf_file:open_gguf",
        "convert.formats.gguf_header:read_header",
    ],
    "shards": [
        "convert.formats.safetensors_files:SafetensorsFiles.read",
        "convert.formats.safetensors_files:_header",
    ],
    "index": ["convert.formats.safetensors_files:_open_shards"],
    "hf config": ["convert.hugging_face.keys:read_keys"],
    "talks": ["data.answers:_template", "data.corpora.documents:_row"],
    "corpus": ["data.corpora.documents:_opened", "data.corpora.files:_here"],
    "bucket": [
        "data.corpora.files:_Stores.below",
        "data.corpora.files:_Stores.matching",
        "data.corpora.files:_in_store",
        "data.prepared.directory:_origin",
        "data.prepared.directory:prepared_here",
        "data.tokenizers.loading:_load_from_store",
        "files.storage:Store.fetch",
        "files.storage:Store.open",
        "files.storage:Store.read",
        "files.storage:Store.sha256",
        "files.storage:fetched_folder",
        "files.storage:open_store",
        "training.run.mirror:fetched",
    ],
    "parquet": [
        "data.corpora.records:_parquet",
        "data.corpora.records:parquet_column",
    ],
    "manifest": ["data.prepared.directory:read_manifest"],
    "arrays": ["data.prepared.directory:_read_index", "files.arrays:read_array"],
    "tokenizer config": [
        "data.tokenizers.checkpoint_text:_object",
        "data.tokenizers.checkpoint_text:read_text_settings",
    ],
    "template file": ["data.tokenizers.checkpoint_text:read_template"],
    "tokenizer": [
        "data.tokenizers.json_tokenizer:JsonTokenizer.load",
        "data.tokenizers.loading:load_tokenizer",
    ],
    "bytes": ["data.tokenizers.loading:_load_bytes"],
    "symbols": ["data.tokenizers.symbols:Symbols.load"],
    "core": ["evaluation.core:_lines", "evaluation.core:_prepared"],
    "exit head": [
        "evaluation.exit_scores:read_exit_head",
        "files.arrays:read_arrays",
    ],
    "journal": ["evaluation.journal:Journal._read", "evaluation.journal:Journal.add"],
    "requests": ["evaluation.requests:_version"],
    "rows": ["evaluation.rows:append_rows", "evaluation.rows:read_rows"],
    "config": [
        "experiment:read_experiment",
        "files.json_files:parse_json",
        "files.json_files:read_json",
        "files.json_files:read_json_object",
    ],
    "run": [
        "training.checkpoint.array_store:_index",
        "training.checkpoint.step_directory:StepDirectory.manifest_text",
        "training.run.run_directory:_look",
    ],
    "metrics": [
        "files.metric_rows:read_rows",
        "training.run.run_directory:RunDirectory.rewind",
    ],
    "lock": [
        "training.run.run_lock:Folder.read",
        "training.run.run_lock:Folder.stamp",
    ],
}
"""Functions by the room that spoils what they read; names are below `recurjax`."""

REASONS = {
    "reads what comes with the package, or the system's own files": [
        "bench.report:_processor",
        "cli.main:_reader_left",
        "cli.options:check_before_import",
        "convert.torch.export:_defined_in",
        "convert.torch.export:_joined",
        "convert.torch.export:auto_source",
        "data.corpora.documents:embedded_text",
        "evaluation.offline_tasks:offline_tasks",
        "evaluation.offline_tasks.longbench:_definition",
        "evaluation.offline_tasks.needles:wonderwords",
        "inference.engine.memory:_free_bytes_here",
        "lazy_names:lazy_names",
        "machine.compiled_programs:_kind",
        "plan.child:_stored",
        "plan.compilers:hashed",
        "run_table:shipped_experiments",
        "serving.app:App._page",
        "training.run.run_lock:_born",
        "training.run.run_lock:_machine",
    ],
    "exchanges messages with a process of its own": [
        "bench.torch_peer:answer_of",
        "convert.parity:_run",
        "data.chat.process:TemplateProcess.render",
        "data.chat.program:_answer",
        "machine.process_group:_Group._listen",
        "plan.child:_compiled",
        "plan.child:main",
        "plan.compilers:compile_elsewhere",
        "training.agreement:each_process",
        "training.agreement:first_process",
        "training.checkpoint.checkpoints:_gathered",
        "training.run.run_directory:check_shared",
    ],
    "writes, and reads nothing back": [
        "cli.evaluate.command:_is_writable",
        "data.prepared.partial:_locked",
        "data.prepared.writing:_write_part",
        "files.atomic:_create",
        "files.atomic:_sync",
        "files.atomic:write_atomic",
        "files.storage:sent_folder",
        "training.run.metrics:MetricsWriter.__init__",
        "training.run.mirror:mirrored",
        "training.run.progress:TrainingProgress._write_log",
        "training.run.run_directory:RunDirectory.append_samples",
        "training.run.run_lock:Folder._written",
        "training.run.run_lock:Folder.create",
        "training.run.trackers:note_start",
    ],
    "copies its own values": [
        "data.prepared.directory:PreparedManifest.to_json",
        "training.checkpoint.manifest:Manifest.to_json",
    ],
    "takes bytes that are compared with a checksum": ["files.atomic:sha256_of"],
    "asks the Hub: tests/convert/test_hub.py has its faults": [
        "convert.push:push",
        "data.corpora.files:_hub_files",
        "data.corpora.files:_on_hub",
        "files.hub:Commit.fetch",
        "files.hub:_cached_commit",
    ],
    "asks a cloud machine's own server: tests/machine/test_distributed.py": [
        "machine.distributed:_metadata",
    ],
    "reads weights by torch: tests/convert/test_authors.py has bad files": [
        "convert.formats.torch_file:open_torch_file",
    ],
    "reads weights of GGUF: tests/convert/test_gguf.py has bad files": [
        "convert.formats.gguf_file:GgufFile._expand",
    ],
    "reads an array by `read_array`: tests/files/test_arrays.py": [
        "cli.convert.command:_read_ids",
        "data.prepared.writing:merge",
    ],
    "reads what an earlier call of the same command left in its own folder": [
        "data.prepared.partial:Partial._read",
        "data.prepared.partial:Partial.keep",
        "machine.compiled_programs:ProgramCache.get",
        "training.checkpoint.step_directory:StepDirectory._note_loss",
        "training.run.run_directory:RunDirectory._frozen_before",
        "training.run.trackers:_ids",
    ],
    "shows a run's files, without what is damaged: tests/cli/test_inspect.py": [
        "cli.inspect.report:_samples",
        "cli.inspect.report:_starts",
        "cli.inspect.runs:_progress",
    ],
    "reads by the readers of the rooms `hf config` and `shards`": [
        "convert.peft:from_peft",
    ],
    "reads manifests as the room of manifests does": [
        "data.prepared.writing:_parts",
    ],
    "reads a file that the user names as text, which any bytes of UTF-8 are": [
        "evaluation.harness:HarnessModel._read_template",
        "evaluation.offline_tasks.needles:read_haystack",
    ],
    "tests/evaluation has its bad files": [
        "evaluation.core:read_bundle",
        "evaluation.offline_tasks.longbench:read_items",
    ],
    "reads pins as packaging does, of a file that the user names": [
        "plan.compilers:_pins",
    ],
    "reads an experiment's file, which is a program": ["run_table:summary_of"],
    "reads experiments/README.md, which comes with the package": [
        "run_table:listed_runs",
    ],
    "listens, and reads nothing itself": ["serving.server:bind"],
}

OF_COMMANDS = {
    "train": "overrides",
    "generate": "prompts",
    "chat": "chat",
    "serve": "request",
    "evaluate": "words",
    "card": "card",
    "convert": "surgery",
    "plan": "words",
    "data": "corpus",
    "bench": "words",
    "experiments": "new",
    "new": "new",
    "doctor": "doctor",
}
"""Commands by one of the rooms that run them."""
WITHOUT_ROOM = {
    "push": "reads a run as `card` does, and sends it to the Hub",
    "compilers": "fetches packages by pip, of which hashes are checked",
    "describe": "reads a config by `read_experiment`, which the room of configs spoils",
    "runs": "shows a run's files, without what is damaged: tests/cli/test_inspect.py",
    "report": "shows a run's files, without what is damaged: tests/cli/test_inspect.py",
}


def readers() -> set[str]:
    """Lists the functions that open something, as module:function."""
    found = set()

    def walk(node: ast.AST, module: str, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                # A function in a function is a part of it.
                is_part = names and isinstance(node, ast.FunctionDef)
                inner = names if is_part else (*names, child.name)
            elif isinstance(child, ast.Call):
                called = child.func
                name = getattr(called, "attr", None) or getattr(called, "id", "")
                if name in READS:
                    found.add(f"{module}:{'.'.join(names)}")
            walk(child, module, inner)

    for name, path in modules().items():
        if name.startswith("recurjax.") and ".torch.modules." not in name:
            walk(tree_of(path), name.removeprefix("recurjax."), ())
    return found


def test_every_function_that_opens_something_is_in_a_room_or_has_a_reason():
    listed = [name for names in (IN_ROOMS | REASONS).values() for name in names]
    assert len(listed) == len(set(listed))
    found = readers()
    assert found - set(listed) == set(), "a room of hostile_inputs.py, or a reason"
    assert set(listed) - found == set(), "they no longer open anything"
    assert IN_ROOMS.keys() <= ROOMS.keys()


def test_a_reason_that_names_a_test_names_one_that_is_there():
    words = [word for reason in REASONS for word in reason.replace(":", "").split()]
    for file in [word for word in words if word.startswith("tests/")]:
        assert (ROOT / file).exists(), file


def test_every_command_is_in_a_room_or_has_a_reason():
    assert OF_COMMANDS.keys() | WITHOUT_ROOM.keys() == COMMANDS.keys()
    assert set(OF_COMMANDS.values()) <= ROOMS.keys()


def test_every_field_of_a_request_is_in_a_body_that_is_spoilt():
    assert set(BODIES["/v1/completions"]) == COMPLETION_FIELDS
    assert set(BODIES["/v1/chat/completions"]) == CHAT_FIELDS
    fields = {field for body in BODIES.values() for field in body}
    for name in ("recurjax.serving.app", "recurjax.serving.bodies"):
        for node in ast.walk(tree_of(modules()[name])):
            match node:
                case (
                    ast.Call(
                        func=ast.Attribute(value=ast.Name(id="body"), attr="get"),
                        args=[ast.Constant(value=field), *_],
                    )
                    | ast.Call(
                        func=ast.Name(id="_number" | "_flag" | "_single"),
                        args=[ast.Name(id="body"), ast.Constant(value=field), *_],
                    )
                ):
                    assert field in fields, field


def test_every_route_that_takes_a_body_is_in_the_room():
    routes = application().asgi.routes
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    assert posts == BODIES.keys()
