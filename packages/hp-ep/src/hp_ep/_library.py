"""Hugging Face transformers, imported on the first call of a function that needs it."""

from importlib import import_module
from typing import Any

_OLDEST = (5, 23)  # the oldest version that the tests use


def transformers_library() -> tuple[Any, Any]:
    """Return transformers and its registry of experts functions."""
    try:
        library = import_module("transformers")
        version = tuple(int(number) for number in library.__version__.split(".")[:2])
        if version >= _OLDEST:
            return library, import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
        found = f"this is {library.__version__}"
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        found = "it is not installed"
    oldest = ".".join(map(str, _OLDEST))
    raise ImportError(
        f"experts of transformers need transformers {oldest} or later, and {found}; "
        f"pip install 'transformers>={oldest}'"
    )
