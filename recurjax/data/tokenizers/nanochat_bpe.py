"""nanochat's BPE: its split pattern, the bytes first, its special tokens last."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from recurjax.data.config import NanochatBpe
from recurjax.data.corpora import CorpusReading
from recurjax.data.tokenizers.bpe import EVERYTHING, TrainingPart
from recurjax.data.tokenizers.json_tokenizer import JsonTokenizer, byte_characters
from recurjax.errors import UserError

PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""GPT-4's, but with runs of at most two digits; merges stay within its matches."""

SPECIAL_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)


DOCUMENT_CHARACTERS = 10_000
"""Characters counted of each document, so that none outweighs the others."""


def train_nanochat_bpe(
    reading: CorpusReading, config: NanochatBpe, *, part: TrainingPart = EVERYTHING
) -> JsonTokenizer:
    """Learns merges: token b is byte b, then the merges, then the special tokens.

    Each merge is of the most frequent pair, among equals the one of lowest tokens, as
    in rustbpe. BOS ends text too. The same text gives the same tokenizer.

    Args:
      reading: the corpus, of which documents are read until enough are seen.
      config: the size of the vocabulary and of the text that merges are counted on.
      part: part of the corpus to read.

    Raises:
      UserError: the text does not yield that many tokens.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = _split()
    trainer = trainers.BpeTrainer(
        # The special tokens come after the merges, so they are left out of the count
        # here.
        vocab_size=config.vocabulary - len(SPECIAL_TOKENS),
        # Token numbers break ties between counts. Number bytes by value here; the
        # library would number an alphabet by its characters.
        special_tokens=list(byte_characters()),
        show_progress=False,
    )
    # Cropping is nanochat's way to keep long documents from deciding the merges.
    texts = part.texts(reading, limit=config.train_bytes, crop=DOCUMENT_CHARACTERS)
    learner.train_from_iterator(texts, trainer)
    size = learner.get_vocab_size() + len(SPECIAL_TOKENS)
    if size < config.vocabulary:
        raise UserError(
            f"the corpus yields only {size} BPE tokens and the config asks for "
            f"{config.vocabulary}: lower the vocabulary"
        )
    model = learner.model
    assert isinstance(model, models.BPE)
    return nanochat_tokenizer(model)


def nanochat_tokenizer(model: models.BPE) -> JsonTokenizer:
    """Returns the tokenizer of given merges, the special tokens after its vocabulary.

    Args:
      model: its tokens are spelt in GPT-2's alphabet of bytes.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _split()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    bos = SPECIAL_TOKENS[0]
    return JsonTokenizer(tokenizer.to_str(), bos=bos, eos=bos)


def _split() -> pre_tokenizers.PreTokenizer:
    pattern = tokenizers.Regex(PATTERN)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            # The pattern has split the text already; only bytes are mapped here.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
