"""The exception for a user's mistakes."""


class UserError(ValueError):
    """Says in one sentence what was wrong and what to do; the command line exits 2."""
