"""Trains a byte-level BPE on a corpus."""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from recurjax.data.config import Bpe
from recurjax.data.corpora import Reading
from recurjax.data.json_tokenizer import JsonTokenizer
from recurjax.errors import UserError

BOS = "<|bos|>"


def train_bpe(
    reading: Reading, config: Bpe, *, validation_fraction: float = 0.0
) -> JsonTokenizer:
    """Learns merges within GPT-2's pre-tokens; token 0 is BOS, which ends text too.

    The same text gives the same tokenizer, hash and all.

    Args:
      reading: the corpus, of which documents are read until enough are seen.
      config: the size of the vocabulary and of the text that merges are counted on.
      validation_fraction: the share at the end of the corpus that is not looked at.

    Raises:
      UserError: the text does not yield that many tokens.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = leading_part(reading, 1.0 - validation_fraction, config.train_bytes)
    learner.train_from_iterator(texts, trainer)
    if learner.get_vocab_size() < config.vocabulary:
        raise UserError(
            f"the corpus yields only {learner.get_vocab_size()} BPE tokens, "
            f"{config.vocabulary} were asked for: choose a smaller vocabulary"
        )
    return JsonTokenizer(learner.to_str(), bos=BOS, eos=BOS)


def leading_part(reading: Reading, share: float, limit: int) -> Iterator[str]:
    """Yields the first share of the corpus, at most about `limit` bytes of text.

    Args:
      share: of the corpus' size on disk, 0 to 1.
    """
    end, before, seen = share * reading.total, 0, 0
    for text, done in reading.documents:
        if done > end:  # this document straddles the end: keep its first part
            text = text[: int(len(text) * (end - before) / (done - before))]
        if not text or seen >= limit:
            return
        seen += len(text.encode("utf-8"))
        yield text
        before = done
