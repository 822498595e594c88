"""`python -m megalite` is the `megalite` command."""

import sys

from megalite.cli import entry

if __name__ == "__main__":
    sys.exit(entry())
