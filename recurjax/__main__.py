"""`python -m recurjax COMMAND ...`: the command line, where its script is not found."""

import sys

from recurjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
