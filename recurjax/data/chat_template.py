"""Conversations as one text: plainly, or by a model's own Jinja template."""

from collections.abc import Sequence

from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError


def plain(messages: Sequence[tuple[str, str]]) -> str:
    """Writes "role: content" a line, up to where the assistant's answer begins."""
    return "".join(f"{role}: {text}\n" for role, text in messages) + "assistant: "


def rendered(
    template: str,
    messages: Sequence[dict[str, str]],
    tokenizer: Tokenizer,
    *,
    bos: bool,
    answer_next: bool = True,
) -> str:
    """Writes a conversation by a template, in a sandbox.

    Args:
      template: the Jinja text.
      messages: with role and content.
      tokenizer: whose BOS and EOS the template names.
      bos: whether BOS is written where the template says so; a caller that puts its
        token before the text leaves it out.
      answer_next: end where the assistant begins.

    Raises:
      UserError: jinja2 is not installed, or the template fails.
    """
    try:
        from jinja2 import TemplateError  # pyright: ignore[reportMissingImports]
        from jinja2.sandbox import (  # pyright: ignore[reportMissingImports]
            ImmutableSandboxedEnvironment,
        )
    except ImportError as error:
        raise UserError("a chat template needs pip install jinja2") from error

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.decode([token])

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return made.from_string(template).render(
            messages=list(messages),
            add_generation_prompt=answer_next,
            bos_token=text(tokenizer.bos) if bos else "",
            eos_token=text(tokenizer.eos),
        )
    except TemplateError as error:
        raise UserError(f"the chat template fails: {error}") from error
