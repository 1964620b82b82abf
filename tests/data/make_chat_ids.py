"""Makes chat_ids.json: what transformers makes of talks, by templates of four styles.

The tokenizers are tiny and made here, each of the kind of a family of models: what
splits words, which names it has, whether BOS is a part of its template. The templates
are written here in the families' styles. Run it where transformers is installed:

    python -m tests.data.make_chat_ids
"""

import json
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

FILE = Path(__file__).with_name("chat_ids.json")
TEXT = [
    "You are a helpful assistant. The user says hello and the assistant answers him.",
    "What is the weather in 2024? It is 25 degrees, and it'll rain on the 31st.",
    "user system assistant model user system assistant model Hello there, how are you?",
]
TALKS = [
    [{"role": "user", "content": "Hello there!"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is 1234 + 5?\n\n"},
    ],
    [
        {"role": "user", "content": "né 🌍 'll  do"},
        {"role": "assistant", "content": "\nIt is.\n"},
        {"role": "user", "content": "a\tb\n\n\nc"},
    ],
]

PLAIN_CHATML = """{%- if messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
HEADERS = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set before = messages[0]['content'] + '\\n\\n' %}
    {%- set said = messages[1:] %}
{%- else %}
    {%- set before = '' %}
    {%- set said = messages %}
{%- endif %}
{%- for message in said %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(before: pre_tokenizers.PreTokenizer, *names: str, regex: bool):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before, after])
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, names, pre_tokenizers.ByteLevel.alphabet())


def sentence_pieces(*names: str):
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(fuse)
    # Bytes are ordinary tokens of such a vocabulary: the first entries behind names.
    pieces = [f"<0x{value:02X}>" for value in range(256)]
    trained(tokenizer, names, [])
    values = json.loads(tokenizer.to_str())
    words = {name: number for number, name in enumerate([*names, *pieces])}
    for word in values["model"]["vocab"]:
        words.setdefault(word, len(words))
    values["model"]["vocab"] = words
    return tokenizers.Tokenizer.from_str(json.dumps(values))


def trained(tokenizer: tokenizers.Tokenizer, names, alphabet):
    special = [AddedToken(name, special=True, normalized=False) for name in names]
    trainer = BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def styles():
    digits = pre_tokenizers.Digits(individual_digits=True)
    three, one = (
        pre_tokenizers.Split(Regex(WORDS % most), behavior="isolated")
        for most in (3, 1)
    )
    chatml = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    smollm2 = byte_level(digits, *chatml, regex=True)
    qwen2 = byte_level(one, *chatml, regex=False)
    qwen2.normalizer = normalizers.NFC()
    headers = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>")
    headers += ("<|end_header_id|>", "<|eot_id|>")
    llama3 = byte_level(three, *headers, regex=False)
    turns = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    gemma = sentence_pieces(*turns)
    yield "smollm2", smollm2, PLAIN_CHATML, (None, "<|im_end|>", "<|im_end|>")
    yield "qwen2", qwen2, PLAIN_CHATML, (None, "<|im_end|>", "<|endoftext|>")
    names = ("<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>")
    yield "llama3", llama3, HEADERS, names
    yield "gemma", gemma, TURNS, ("<bos>", "<eos>", "<pad>")


def main() -> None:
    import transformers

    cases = {}
    for style, result, template, (bos, eos, pad) in styles():
        names = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
        with tempfile.TemporaryDirectory() as folder:
            result.save(f"{folder}/tokenizer.json")
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (Path(folder) / "tokenizer_config.json").write_text(
                json.dumps(names | kind)
            )
            (Path(folder) / "chat_template.jinja").write_text(template)
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ids = [
            [
                theirs.apply_chat_template(
                    talk, add_generation_prompt=answer, return_dict=False
                )
                for answer in (True, False)
            ]
            for talk in TALKS
        ]
        cases[style] = {
            "definition": result.to_str(),
            "template": template,
            "names": names,
            "ids": ids,
        }
    origin = f"tests/data/make_chat_ids.py, transformers {transformers.__version__}"
    whole = {"origin": origin, "talks": TALKS, "styles": cases}
    FILE.write_text(json.dumps(whole, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
