"""Tokenizing in several processes, with the documents in their order."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from recurjax.data.corpora import Document, Reading
from recurjax.data.encoding import EncodedDocument, encode_group, groups_of
from recurjax.data.tokenizers import Tokenizer, load_tokenizer
from recurjax.errors import UserError

_AHEAD = 2
"""Groups waiting for each process: one that it works on, and the next."""


def encode_in_processes(
    reading: Reading, saved: Path, *, workers: int, ends: bool | None
) -> Iterator[EncodedDocument]:
    """Yields what `encoded_documents` yields, tokenized by `workers` processes.

    This process reads the corpus and hands groups of documents on; a group's tokens
    come back before those of the next are asked for, so that the order is the corpus'.

    Args:
      reading: the corpus.
      saved: a folder with the tokenizer, which each process loads for itself.
      workers: how many.
      ends: see `encoded_documents`.

    Raises:
      UserError: a process was ended from outside.
    """
    pool = ProcessPoolExecutor(
        workers,
        # A fork would copy the threads' locks of what this process has imported.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(str(saved), ends),
    )
    waiting: deque[Future[list[EncodedDocument]]] = deque()
    try:
        for group in groups_of(reading):
            waiting.append(pool.submit(_encode, group))
            # The oldest group is waited for, so that documents come in the corpus'
            # order and no more than a few groups are in memory.
            if len(waiting) > _AHEAD * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process was ended from outside, for want of memory most "
            "likely: choose fewer --workers"
        ) from error
    finally:
        # Groups that nobody will read are dropped; a running one is waited for.
        pool.shutdown(wait=True, cancel_futures=True)


_tokenizer: Tokenizer | None = None
_ends: bool | None = None


def _begin(saved: str, ends: bool | None) -> None:
    global _tokenizer, _ends
    # One thread each: the processes are as many as there are cores to use.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer, _ends = load_tokenizer(saved), ends


def _encode(group: list[Document]) -> list[EncodedDocument]:
    assert _tokenizer is not None
    return list(encode_group(group, _tokenizer, ends=_ends))
