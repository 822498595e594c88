"""`python -m megalite` is the `megalite` command."""

import sys

from megalite.cli import main

if __name__ == "__main__":
    sys.exit(main())
