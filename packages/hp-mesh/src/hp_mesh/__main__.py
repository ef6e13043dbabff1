"""Run the command line as ``python -m`` of the package."""

from .cli import main

raise SystemExit(main())
