"""``python tools/train``: train, with nothing to configure."""

import signal
import sys
from pathlib import Path

# Ctrl-C ends this process at once and without a traceback until `launch` or `run_rank` hears it.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if not __package__:  # started as a folder: make the folder the package that it is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from train.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
