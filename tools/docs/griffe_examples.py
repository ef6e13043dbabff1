"""An extension of griffe for the headings of this repository's docstrings."""

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Reads ``Example:`` as ``Examples:``, the heading under which griffe expects ``>>>`` lines."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Replace the heading in the docstring of one object."""
        if obj.docstring:
            value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = value
