"""Run the command line with ``python -m hp_mesh.cli``."""

from ._main import main

raise SystemExit(main())
