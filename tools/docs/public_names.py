"""Which names of the packages are public, read from their sources without importing them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import docstrings  # noqa: E402


@dataclass(frozen=True, slots=True)
class Name:
    """A public name: the paths under which a page may have it, and whether it is documented."""

    paths: tuple[str, ...]
    documented: bool


def public_names(package: str, sources: Path = ROOT / "packages") -> list[Name]:
    """Return the names in ``__all__`` of a package and its public modules, and their methods.

    Names of other packages count as documented, and so do constants.
    """
    source = sources / package.replace("_", "-") / "src"
    exports = docstrings.exported(docstrings.load([source]))
    return [name for each in exports if each.name != "__version__" for name in _names(each)]


def _names(export: docstrings.Export) -> Iterator[Name]:
    """Yield a name, and its methods and properties if it is a class."""
    root, target = export.module.package, export.target
    paths = [f"{export.module.path}.{export.name}"]
    if target is None:
        yield Name((*paths,), documented=True)
        return
    same = root.members.get(export.name)
    if export.module is not root and same and docstrings.definition_of(same) is target:
        paths.append(f"{root.path}.{export.name}")  # a page has it once
    yield Name((*paths,), target.docstring is not None or target.kind is griffe.Kind.ATTRIBUTE)
    if isinstance(target, griffe.Class):
        for member in docstrings.public_members(target):
            here = tuple(f"{path}.{member.name}" for path in paths)
            yield Name(here, documented=bool(member.docstring))
