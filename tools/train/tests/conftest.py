"""The trainer is a folder, not an installed package: let tests import it by its name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
