"""`python -m recfuse`: the same as the command `recfuse`."""

import sys

from recfuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
