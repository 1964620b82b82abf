"""Trains a byte-level BPE on a corpus."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from recurjax.data.config import Bpe
from recurjax.data.corpora import CorpusReading
from recurjax.data.tokenizers.json_tokenizer import JsonTokenizer
from recurjax.errors import UserError

BOS = "<|bos|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPart:
    """The leading part of a corpus that a tokenizer may learn from.

    Attributes:
      share: share of the corpus, or of `used_bytes`, that is not validation; 0 to 1.
      used_bytes: bytes of text, at least, that will be used of the corpus; None: all of
        it, and the share is of its size on disk.
    """

    share: float = 1.0
    used_bytes: int | None = None

    def texts(
        self, reading: CorpusReading, *, limit: int, crop: int | None = None
    ) -> Iterator[str]:
        """Yields the documents of the part, at most about `limit` bytes of text.

        Args:
          reading: the corpus.
          limit: in bytes of what is yielded.
          crop: characters of a document that are yielded, its first; None: all.
        """
        # The part ends at a share of the corpus on disk; where only the beginning of
        # the corpus will be used, also at that share of its text.
        end, before, seen, yielded = self.share * reading.total, 0, 0, 0
        reach = math.inf if self.used_bytes is None else self.share * self.used_bytes
        # `done` is where this document ends, `before` where the one before it ended.
        for text, done in reading.documents:
            if before >= end or seen >= reach or yielded >= limit:
                return
            if done > end:  # this document straddles the end: keep its first part
                text = text[: int(len(text) * (end - before) / (done - before))]
            size = len(text.encode("utf-8"))
            if seen + size > reach:
                # Characters and bytes are taken as proportional: the end need not fall
                # on an exact byte, only always on the same one.
                text = text[: int(len(text) * (reach - seen) / size)]
            if not text:
                return
            # A crop shortens what is counted, not how far into the corpus it is.
            shown = text if crop is None else text[:crop]
            yielded += len(shown.encode("utf-8"))
            yield shown
            before, seen = done, seen + size


EVERYTHING = TrainingPart()


def train_bpe(
    reading: CorpusReading, config: Bpe, *, part: TrainingPart = EVERYTHING
) -> JsonTokenizer:
    """Learns merges within GPT-2's pre-tokens; token 0 is BOS, which ends text too.

    The same text gives the same tokenizer, hash and all.

    Args:
      reading: the corpus, of which documents are read until enough are seen.
      config: the size of the vocabulary and of the text that merges are counted on.
      part: part of the corpus to read.

    Raises:
      UserError: the text does not yield that many tokens.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=[BOS],
        # All 256 bytes from the start, sorted: every text can be encoded, and the
        # numbers do not depend on the order in which bytes come.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = part.texts(reading, limit=config.train_bytes)
    learner.train_from_iterator(texts, trainer)
    if learner.get_vocab_size() < config.vocabulary:
        raise UserError(
            f"the corpus yields only {learner.get_vocab_size()} BPE tokens and "
            f"the config asks for {config.vocabulary}: lower the vocabulary"
        )
    return JsonTokenizer(learner.to_str(), bos=BOS, eos=BOS)
