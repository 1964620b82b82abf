"""The one exception that stands for a mistake of the user."""


class UserError(ValueError):
    """Says in one sentence what was wrong and what to do; the command line exits 2."""
