"""LongBench's English tasks: what is asked, how long answers are, what scores them.

Source: Bai et al. 2023, LongBench, and its public `config` and `eval`; RAT's evaluation
for where the answer of a model without instruction tuning ends.
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal[
    "f1", "rouge_l", "classification", "retrieval", "count", "edit_similarity"
]

_MORE = ("\nQuestion",)
"""What such a model goes on with after its answer: the next question."""


@dataclass(frozen=True, kw_only=True)
class LongBenchTask:
    """One task.

    Attributes:
      prompt: with the item's {context} and {input}.
      most: new tokens at the most.
      metric: compares the answer with each right one; the best counts.
      ends: RAT's postprocessing: the answer ends before these, its leading line breaks
        dropped; None leaves the answer as it is.
      one_line: LongBench's own: only the first line counts.
      summary: RAT's repetition penalty holds.
    """

    prompt: str
    most: int
    metric: Metric
    ends: tuple[str, ...] | None = None
    one_line: bool = False
    summary: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do "
    "not output any other words.\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do "
    "not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_CONCISELY = (
    "as concisely as you can, using a single phrase if possible. Do not provide any "
    "explanation."
)
_UNANSWERABLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the "
    "question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or '
    '"unanswerable". Do not provide any explanation.'
)

# The prompts are LongBench's to the letter, odd spaces included: another wording would
# be another benchmark. `most` is its table of answer lengths.
TASKS: dict[str, LongBenchTask] = {
    "narrativeqa": LongBenchTask(
        prompt="You are given a story, which can be either a novel or a movie script, "
        f"and a question. Answer the question {_CONCISELY}\n\nStory: {{context}}\n\n"
        f"Now, answer the question based on the story {_CONCISELY}\n\n"
        "Question: {input}\n\nAnswer:",
        most=128,
        metric="f1",
        ends=_MORE,
    ),
    "qasper": LongBenchTask(
        prompt="You are given a scientific article and a question. Answer the question "
        f"{_UNANSWERABLE}\n\nArticle: {{context}}\n\n Answer the question based on the "
        f"above article {_UNANSWERABLE}\n\nQuestion: {{input}}\n\nAnswer:",
        most=128,
        metric="f1",
        ends=_MORE,
    ),
    "multifieldqa_en": LongBenchTask(
        prompt="Read the following text and answer briefly.\n\n{context}\n\nNow, "
        "answer the following question based on the above text, only give me the "
        "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        most=64,
        metric="f1",
        ends=_MORE,
    ),
    **{
        name: LongBenchTask(prompt=_PASSAGES, most=32, metric="f1", ends=_MORE)
        for name in ("hotpotqa", "2wikimqa", "musique")
    },
    "gov_report": LongBenchTask(
        prompt="You are given a report by a government agency. Write a one-page "
        "summary of the report.\n\nReport:\n{context}\n\nNow, write a one-page summary "
        "of the report.\n\nSummary:",
        most=512,
        metric="rouge_l",
        summary=True,
    ),
    "qmsum": LongBenchTask(
        prompt="You are given a meeting transcript and a query containing a question "
        "or instruction. Answer the query in one or more sentences.\n\nTranscript:\n"
        "{context}\n\nNow, answer the query based on the above meeting transcript in "
        "one or more sentences.\n\nQuery: {input}\nAnswer:",
        most=512,
        metric="rouge_l",
        ends=("\nQuery", *_MORE),
        summary=True,
    ),
    "multi_news": LongBenchTask(
        prompt="You are given several news passages. Write a one-page summary of all "
        "news. \n\nNews:\n{context}\n\nNow, write a one-page summary of all the news."
        "\n\nSummary:",
        most=512,
        metric="rouge_l",
        summary=True,
    ),
    "trec": LongBenchTask(
        prompt="Please determine the type of the question below. Here are some "
        "examples of questions.\n\n{context}\n{input}",
        most=64,
        metric="classification",
        ends=_MORE,
        one_line=True,
    ),
    "triviaqa": LongBenchTask(
        prompt="Answer the question based on the given passage. Only give me the "
        "answer and do not output any other words. The following are some examples."
        "\n\n{context}\n\n{input}",
        most=32,
        metric="f1",
        ends=_MORE,
        one_line=True,
    ),
    "samsum": LongBenchTask(
        prompt="Summarize the dialogue into a few short sentences. The following are "
        "some examples.\n\n{context}\n\n{input}",
        most=128,
        metric="rouge_l",
        one_line=True,
    ),
    "passage_count": LongBenchTask(
        prompt="There are some paragraphs below sourced from Wikipedia. Some of them "
        "may be duplicates. Please carefully read these paragraphs and determine how "
        "many unique paragraphs there are after removing duplicates. In other words, "
        "how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease "
        "enter the final count of unique paragraphs after removing duplicates. The "
        "output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        most=32,
        metric="count",
    ),
    "passage_retrieval_en": LongBenchTask(
        prompt="Here are 30 paragraphs from Wikipedia, along with an abstract. Please "
        "determine which paragraph the abstract is from.\n\n{context}\n\nThe following "
        "is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
        'the abstract is from. The answer format must be like "Paragraph 1", '
        '"Paragraph 2", etc.\n\nThe answer is: ',
        most=32,
        metric="retrieval",
    ),
    "lcc": LongBenchTask(
        prompt="Please complete the code given below. \n{context}Next line of code:\n",
        most=64,
        metric="edit_similarity",
    ),
    "repobench-p": LongBenchTask(
        prompt="Please complete the code given below. \n{context}{input}Next line of "
        "code:\n",
        most=64,
        metric="edit_similarity",
    ),
}
"""By the names of its files. RAT leaves the count and the retrieval out."""
