"""Which names of the packages are public, read from their sources without importing them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from griffe import (
    Alias,
    AliasResolutionError,
    ExprDict,
    ExprName,
    GriffeLoader,
    Kind,
    Module,
    Object,
)

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Name:
    """A public name: the paths under which a page may have it, and whether it is documented."""

    paths: tuple[str, ...]
    documented: bool


def public_names(package: str, sources: Path = ROOT / "packages") -> list[Name]:
    """Return the names of ``__all__`` of a package and its public modules, and their methods.

    A module is public if it has ``__all__``, or functions and classes of its own, and no part of
    its path begins with an underscore. Constants and names of other
    libraries count as documented.
    """
    paths = [str(path) for path in sorted(sources.glob("*/src"))]
    root = GriffeLoader(search_paths=paths).load(package)
    assert isinstance(root, Module)
    modules = [root, *(m for m in root.modules.values() if not m.name.startswith("_"))]
    return [
        name
        for module in modules
        if not module.is_alias
        for exported in _exports(module)
        for name in _names(module, exported, root)
    ]


def _exports(module: Module) -> list[str]:
    """Return the names in ``__all__``, with the keys of dictionaries that are unpacked there."""
    if module.exports is None:
        return [
            name
            for name, member in module.members.items()
            if not member.is_alias and not name.startswith("_") and _is_callable(member)
        ]
    found: list[str] = []
    for entry in module.exports:
        if isinstance(entry, str):
            found.append(entry)
            continue
        assert isinstance(entry, ExprName), f"{module.path}.__all__ has {entry}"
        value = module[entry.name].value
        assert isinstance(value, ExprDict), f"{module.path}.__all__ unpacks {entry.name}"
        found += [str(key).strip("'\"") for key in value.keys]
    return [name for name in dict.fromkeys(found) if name != "__version__"]


def _is_callable(member: Object | Alias) -> bool:
    return member.kind in (Kind.FUNCTION, Kind.CLASS)


def _names(module: Module, name: str, root: Module) -> Iterator[Name]:
    """Give a name, and if it is a class its methods and properties."""
    own = f"{module.path}.{name}"
    try:
        target = _target(module[name])
        same = name in root.members and _target(root[name]) is target
    except AliasResolutionError:
        yield Name((own,), documented=True)
        return
    paths = tuple(dict.fromkeys((own, f"{root.path}.{name}" if same else own)))
    documented = target.docstring is not None or target.kind is Kind.ATTRIBUTE
    yield Name(paths, documented)
    if target.kind is not Kind.CLASS:
        return
    methods = {**_of_private_bases(target), **target.members}
    for inner, method in methods.items():
        is_property = "property" in method.labels
        if not inner.startswith("_") and (method.kind is Kind.FUNCTION or is_property):
            here = tuple(f"{path}.{inner}" for path in paths)
            yield Name(here, documented=bool(method.docstring))


def _target(member: Object | Alias) -> Object:
    found = member.final_target if isinstance(member, Alias) else member
    assert isinstance(found, Object)
    return found


def _of_private_bases(target: Object) -> dict[str, Object | Alias]:
    """Return what a class inherits from classes that no page describes."""
    inherited = target.inherited_members
    return {
        name: member.final_target
        for name, member in inherited.items()
        if member.final_target.parent and member.final_target.parent.name.startswith("_")
    }
