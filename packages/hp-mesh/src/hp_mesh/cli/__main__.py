"""Run the command line as ``python -m`` of this subpackage."""

from ._main import main

raise SystemExit(main())
