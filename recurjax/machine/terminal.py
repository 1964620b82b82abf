"""A model's text on a terminal, which takes some characters for commands."""

import sys

# Escape sequences move the cursor, rename windows and answer as if somebody typed.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def write(text: str) -> None:
    """Writes a piece of text at once; on a terminal, control characters as pictures.

    A file or a pipe gets the text as it is.
    """
    sys.stdout.write(text.translate(_SHOWN) if sys.stdout.isatty() else text)
    # Python would hold short pieces back until a line is full.
    sys.stdout.flush()
