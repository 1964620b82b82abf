"""Chats by 30 templates and 8 kinds of tokenizer, as transformers encodes them.

The templates are written here in the styles of public families of models; between them
they use what transformers' environment has beyond plain jinja2. Run as a script where
transformers is installed, it writes a digest of the ids of every chat:

    python -m tests.data.chat_styles tests/data/chat_styles.json
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.data.tokenizers.text_folders import KINDS

RECORD = Path(__file__).with_name("chat_styles.json")
# The flags of role tokens differ by kind: all that a tokenizer.json can state.
FLAGS: dict[str, dict[str, bool]] = {
    "byte_level": {},
    "byte_level_space": {"lstrip": True},
    "prepend": {"rstrip": True},
    "metaspace_first": {},
    "metaspace_always": {"special": False},
    "metaspace_never": {"rstrip": True, "lstrip": True},
    "unigram": {"normalized": True},
    "lowercase": {"single_word": True},
}
ROLES = ("<|sys|>", "<|user|>", "<|asst|>", "<|tool|>", "<|end|>", "<|im_start|>")
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Finds <b>words</b> & "signs" in né texts',
        "parameters": {"type": "object", "properties": {"z": {}, "a": {"n": 1}}},
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": "hi you"}]},
    "system": {
        "messages": [
            {"role": "system", "content": "be old. "},
            {"role": "user", "content": "  the sea?\n"},
        ]
    },
    "several": {
        "messages": [
            {"role": "user", "content": "né 漢字\n\n of the"},
            {"role": "assistant", "content": "\nyes, the ship."},
            {"role": "user", "content": "so"},
            {"role": "assistant", "content": "you and me "},
        ]
    },
    "tools": {
        "messages": [
            {"role": "system", "content": "use tools"},
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": "a<b & 'c'"},
            {"role": "tool", "content": "found"},
        ],
        "tools": [_TOOL],
    },
}

_EACH = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}"
_ROLE = (
    "{{ {'system': '<|sys|>', 'user': '<|user|>', 'tool': '<|tool|>'}"
    ".get(m.role, '<|asst|>') }}"
)
TEMPLATES: dict[str, str] = {
    "im_lines": _EACH
    + "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}" + _PROMPT + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "im_default_system": "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\nYou help.<|end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}",
    "im_loop_first": _EACH + "{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nhelp<|end|>\n' }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    + _PROMPT
    + "<|im_start|>assistant\n{% endif %}",
    "im_tools": "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    + _EACH
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}",
    "im_trimmed_tools": "{%- if tools is defined and tools %}"
    "{{- '<|sys|>' + (tools | tojson(indent=2)) + '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{{- m.content | trim + '<|end|>' + '\n' }}{%- endfor %}",
    "headers": "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '<|end|>\n\n' + m.content | trim + eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant<|end|>\n\n' }}{%- endif %}",
    "headers_dated": "{{- bos_token }}{%- if not date_string is defined %}"
    "{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{{- '<|sys|>Today: ' + date_string + '\n' }}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + m.content | trim }}"
    "{%- endfor %}",
    "headers_tools_none": "{{- bos_token }}{%- if not tools is defined %}"
    "{%- set tools = none %}{%- endif %}{%- if tools is not none %}"
    "{{- 'Environment: tools\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}"
    "{%- endfor %}{%- endif %}"
    "{%- for m in messages %}{{- '<|user|>' + m.content }}{%- endfor %}",
    "inst": "{{ bos_token }}" + _EACH + "{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "inst_system_folded": "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set rest = messages[1:] %}{% else %}"
    "{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if loop.index0 == 0 and system %}"
    "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content.strip() + ' ' }}{% endfor %}",
    "inst_namespace": "{%- set ns = namespace(n=0) %}{{- bos_token }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.n = ns.n + 1 %}"
    "{{- '[' + ns.n|string + '] ' + m.content }}{%- else %}{{- ' ' + m.content }}"
    "{%- endif %}{%- endfor %}",
    "turns": "{{ bos_token }}"
    + _EACH
    + "{% if m.role == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = m.role %}{% endif %}"
    "{{ '<|im_start|>' + role + '\n' + m.content | trim + '<|end|>\n' }}{% endfor %}"
    + _PROMPT
    + "{{ '<|im_start|>model\n' }}{% endif %}",
    "turns_first_system": "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set chat = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}"
    "{%- set chat = messages -%}{%- endif -%}{%- for m in chat -%}"
    "{{ '<|im_start|>' + m.role + '\n' + (prefix if loop.first else '') }}"
    "{{ m['content'] | trim }}{{ '<|end|>\n' }}{%- endfor -%}",
    "roles_bare": "{{ bos_token }}" + _EACH + _ROLE + "{{ m.content }}<|end|>"
    "{% endfor %}" + _PROMPT + "<|asst|>{% endif %}",
    "roles_lines": _EACH
    + _ROLE
    + "\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    + _PROMPT
    + "<|asst|>\n{% endif %}",
    "roles_spaces": _EACH
    + _ROLE
    + " {{ m.content }} <|end|> {% endfor %}"
    + _PROMPT
    + "<|asst|> {% endif %}",
    "roles_generation": _EACH + "{% if m.role == 'assistant' %}"
    "<|asst|>{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n{% else %}"
    + _ROLE
    + "{{ m.content }}<|end|>\n{% endif %}{% endfor %}",
    "roles_generation_trimmed": "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|asst|>' }}{%- generation -%}"
    "{{ m.content + eos_token }}{%- endgeneration -%}{%- else -%}"
    "{{ '<|user|>' + m.content }}{%- endif -%}{%- endfor -%}",
    "documents": "{% if documents is not none %}DOCS{% endif %}"
    + _EACH
    + _ROLE
    + "{{ m.content }}{% endfor %}",
    "json_messages": _EACH + "{{ m | tojson }}{{ eos_token }}{% endfor %}",
    "json_options": _EACH + "{{ m | tojson(indent=1, ensure_ascii=True) }}{% endfor %}",
    "loop_controls": _EACH + "{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}",
    "macro": "{%- macro turn(m) -%}{{- '<|im_start|>' + m.role + ' ' + m.content -}}"
    "{%- endmacro -%}{%- for m in messages -%}{{ turn(m) }}{{ '<|end|>' }}"
    "{%- endfor -%}",
    "last_only": "{{ messages[-1].content }}<|end|>",
    "strip_thoughts": _EACH + "{% set text = m.content.split('</think>')[-1] %}"
    "<|im_start|>{{ m.role }}\n{{ text.lstrip('\n') }}<|end|>\n{% endfor %}",
    "is_string": _EACH + "{% if m.content is string %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}",
    "indented_block": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n"
    "        {{- '<|user|>' + m.content }}\n    {%- else %}\n"
    "        {{- '<|asst|>' + m.content + '<|end|>' }}\n    {%- endif %}\n"
    "{%- endfor %}\n",
    "trailing_newlines": _EACH + "{{ m.content }}\n\n<|end|>\n\n{% endfor %}\n",
    "pad_and_unk": "{{ pad_token }}" + _EACH + "{{ unk_token }}{{ m.content }}"
    "{% endfor %}",
    "deep_roles": "{% if not add_generation_prompt is defined %}"
    "{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<|user|>' + m.content }}"
    "{%- elif m['role'] == 'assistant' %}{{ '<|asst|>' + m.content + eos_token }}"
    "{%- endif %}{%- endfor %}" + _PROMPT + "{{ '<|asst|>' }}{% endif %}",
}


def write_folder(folder: Path, kind: str) -> None:
    """Writes a tokenizer whose roles have the flags of its kind."""
    tokenizer = KINDS[kind]()
    flags = {"special": True, "normalized": False} | FLAGS[kind]
    roles = [AddedToken(name, **flags) for name in ROLES]
    (tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens)(roles)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def cases() -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Yields name, template, chat and whether it ends where an answer begins."""
    for style, template in TEMPLATES.items():
        for talk, chat in CHATS.items():
            for answer in (True, False):
                yield f"{style}/{talk}/{int(answer)}", template, chat, answer


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def by_transformers(folder: Path) -> dict[str, list[int]]:
    """Returns the ids of every chat; needs no torch."""
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    tokenizer, result = AutoTokenizer.from_pretrained(folder), {}
    for name, template, chat, answer in cases():
        ids = tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            chat_template=template,
            add_generation_prompt=answer,
            tokenize=True,
        )
        result[name] = list(ids["input_ids"] if hasattr(ids, "keys") else ids)
    return result


def main(out: Path) -> None:
    """Writes the digests."""
    import transformers  # pyright: ignore[reportMissingImports]

    record: dict[str, Any] = {"transformers": transformers.__version__}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), kind)
            ids = by_transformers(Path(folder))
        record[kind] = [digest(row) for row in ids.values()]
    out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
