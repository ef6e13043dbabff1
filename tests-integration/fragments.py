"""Fragments of code in READMEs and documentation pages, for tests that run them.

A fragment leaves out the model or the data. ``tools/examples.py`` does not run it: its block is
marked ``not run``.
"""

from pathlib import Path

import examples

ROOT = Path(__file__).resolve().parents[1]


def pages_of(package: str) -> list[Path]:
    """Return the README of a package and its documentation pages."""
    pages = sorted((ROOT / "tools" / "docs" / "pages" / package).glob("*.md"))
    return [ROOT / "packages" / package / "README.md", *pages]


def fragment(package: str, *phrases: str) -> str:
    """Return the one fragment of a package that contains all phrases.

    The same fragment may be on several pages.
    """
    blocks = [block for page in pages_of(package) for block in examples.blocks_of(page)]
    python = {
        block.text for block in blocks if not block.run and block.language in ("python", "py")
    }
    found = [text for text in python if all(phrase in text for phrase in phrases)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} fragments of {package} have {phrases}; there must be one")
    return found[0]
