"""``python tools/train``: train, with nothing to configure."""

import sys
from pathlib import Path

if not __package__:  # started as a folder: make the folder the package that it is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
