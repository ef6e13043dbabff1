"""Check that the public names of the packages are documented.

    python tools/docstrings.py packages/*/src

The reference pages are made from docstrings, so a missing section is a hole in a page. griffe reads
the sources without importing them. A name is public if it is in ``__all__`` of a package or of one
of its modules without a leading underscore. Public methods and properties of public classes are
public too. Special methods are not checked.

Rules:

- A module without a leading underscore that defines functions or classes without one has
  ``__all__``. It defines or imports all names in ``__all__``.
- Every public name has a docstring in Google style.
- Functions, methods and classes with arguments have ``Args``. Every argument is documented, and
  every documented argument exists. ``Attributes`` counts too, for dataclasses and named tuples.
- Functions and methods with a result other than None have ``Returns`` or ``Yields``.
- An error that the body raises is in ``Raises``, itself or a base class of the same packages. So is
  an error of a private function of the same module or class that the body calls. A ``try`` with
  handlers is not followed.
- Functions and classes in ``__all__`` have ``Examples`` (plural: griffe does not read ``Example``).
- Exceptions need one sentence, which says when they are raised. Constants and type aliases need one
  sentence. They have no example.
- Properties need one sentence.
- Methods need one sentence if a base class documents them, or a protocol of the same package whose
  methods the class has. The same holds if the sentence links to ``docs.pytorch.org``.
"""

import argparse
import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import griffe

TORCH_PAGES = "docs.pytorch.org"
NO_RESULT = ("", "None", "NoReturn", "Never")
DATA = ("NamedTuple", "TypedDict")
# A caller does not plan for these: a bug, or a method that a subclass has to write.
NOT_DOCUMENTED = ("AssertionError", "NotImplementedError", "StopIteration")
Kind = griffe.DocstringSectionKind


def check(sources: Sequence[Path]) -> list[str]:
    """Return one line for each thing that the docstrings of packages lack.

    Args:
        sources: Folders that hold packages, each importable if the folder is in ``sys.path``.

    Returns:
        Lines like ``file:line: name lacks ...``, sorted.
    """
    packages = load(sources)
    found = {line for package in packages for line in _check_modules(package)}
    found |= {
        line
        for export in exported(packages)
        if export.target is not None
        for line in _check_export(export.target)
    }
    return sorted(found)


class Export(NamedTuple):
    """A name in the ``__all__`` of a module, and its definition.

    Attributes:
        module: The module that has the ``__all__``.
        name: The name.
        target: The definition, or None if it is in a package that is not loaded.
    """

    module: griffe.Module
    name: str
    target: griffe.Object | None


def load(sources: Sequence[Path]) -> list[griffe.Module]:
    """Read packages without importing them.

    Args:
        sources: As in `check`.

    Returns:
        The packages, sorted by the names of their folders.
    """
    loader = griffe.GriffeLoader(search_paths=list(sources))
    folders = (path.parent for source in sources for path in source.glob("*/__init__.py"))
    packages = [loader.load(folder.name) for folder in sorted(folders)]
    loader.resolve_aliases(external=False)
    return [package for package in packages if isinstance(package, griffe.Module)]


def exported(packages: Iterable[griffe.Module]) -> Iterator[Export]:
    """Yield the names in each ``__all__`` of packages.

    Args:
        packages: Packages from `load`.

    Yields:
        The names of the public modules of each package, the package itself first.
    """
    for package in packages:
        for module in _public_modules(package):
            for name in _exported(module):
                yield Export(module, name, definition_of(module[name]))


def _public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield the modules of a package that have ``__all__`` and no underscore."""
    return (each for each in _modules(module) if "__all__" in each.members)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield a package and its modules without an underscore, at any depth."""
    yield module
    for name, member in module.members.items():
        if not name.startswith("_") and isinstance(member, griffe.Module):
            yield from _modules(member)


def _check_modules(package: griffe.Module) -> Iterator[str]:
    """Yield the modules of a package that lack ``__all__``, or a name in it."""
    for module in _modules(package):
        for name in _listed(module):
            if name not in module.all_members:
                yield f"{_file(module)}:1: {module.path} lacks {name}, which is in its __all__"
        public = (member for name, member in module.members.items() if not name.startswith("_"))
        own = any(isinstance(each, (griffe.Function, griffe.Class)) for each in public)
        if own and "__all__" not in module.members:
            yield f"{_file(module)}:1: {module.path} lacks __all__"


def _exported(module: griffe.Module) -> Iterator[str]:
    """Yield the names in ``__all__`` that the module has. `check` reports the others."""
    return (name for name in _listed(module) if name in module.all_members)


def _listed(module: griffe.Module) -> Iterator[str]:
    """Yield the names in ``__all__``; a starred name stands for the keys of a literal."""
    for item in module.exports or ():
        if isinstance(item, str):
            yield item
        else:
            yield from ast.literal_eval(str(module[str(item)].value))


def definition_of(member: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """Return the object behind a name.

    Args:
        member: The member of a module or class.

    Returns:
        The definition, or None if it is in a package that is not loaded.
    """
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def _check_export(target: griffe.Object) -> Iterator[str]:
    """Yield the lacks of a name in ``__all__`` and of its members."""
    if target.name == "__version__":
        return
    if target.docstring is None:
        yield _line(target, "a docstring")
    if isinstance(target, griffe.Class):
        error = _is_exception(target)
        if target.docstring is not None and not error:
            yield from _check_class(target)
            yield from _check_examples(target)
        for member in public_members(target):
            yield from _check_member(target, member)
    elif isinstance(target, griffe.Function) and target.docstring is not None:
        yield from _check_function(target)
        yield from _check_examples(target)


def _check_class(target: griffe.Class) -> Iterator[str]:
    """Yield the lacks of a class's own docstring."""
    bases = {str(base).rpartition(".")[2].partition("[")[0] for base in target.bases}
    if _is_protocol(target):
        arguments = []
    elif bases.intersection(DATA):
        arguments = [name for name, m in target.members.items() if m.is_attribute]
    else:
        arguments = [p.name for p in target.parameters if p.name != "self"]
    known = set(arguments)
    if "__init__" not in target.all_members and "dataclass" not in target.labels:
        known |= {item.name for item in _sections(target).get(Kind.parameters, ())}
    if "dataclass" in target.labels or bases.intersection(DATA):
        known |= {name for name, member in target.all_members.items() if member.is_attribute}
    raised: set[str] = set()
    for name in ("__init__", "__post_init__"):
        if name in target.members:
            raised |= _raised(target, name)
    yield from _check_arguments(target, arguments, known)
    yield from _check_raises(target, raised)


def _check_function(target: griffe.Function) -> Iterator[str]:
    """Yield the lacks of a function's or method's docstring."""
    arguments = [p.name for p in target.parameters]
    if _owner(target).is_class and "staticmethod" not in target.labels:
        arguments = arguments[1:]
    yield from _check_arguments(target, arguments, set(arguments))
    if _has_result(target) and not (_sections(target).keys() & {Kind.returns, Kind.yields}):
        yield _line(target, "Returns")
    yield from _check_raises(target, _raised(_owner(target), target.name))


def _check_member(owner: griffe.Class, member: griffe.Object) -> Iterator[str]:
    """Yield the lacks of a public method or property."""
    inherited = any(
        base.members[member.name].docstring is not None
        for base in (*_own_bases(owner), *_protocols(owner))
        if member.name in base.members
    )
    if member.docstring is None:
        if not inherited:
            yield _line(member, "a docstring")
    elif inherited or TORCH_PAGES in member.docstring.value:
        return
    elif isinstance(member, griffe.Function):
        yield from _check_function(member)


def _check_arguments(
    target: griffe.Object, arguments: Sequence[str], known: set[str]
) -> Iterator[str]:
    sections = _sections(target)
    documented = {
        item.name.lstrip("*")
        for kind in (Kind.parameters, Kind.other_parameters, Kind.attributes)
        for item in sections.get(kind, ())
    }
    checked = documented - {item.name for item in sections.get(Kind.attributes, ())}
    if arguments and not documented:
        yield _line(target, "Args")
        return
    for name in arguments:
        if name not in documented:
            yield _line(target, f"{name} in Args")
    for name in sorted(checked - known):
        yield _line(target, f"an argument {name}, which its Args document")


def _check_raises(target: griffe.Object, raised: set[str]) -> Iterator[str]:
    documented = {
        str(item.annotation).rpartition(".")[2] for item in _sections(target).get(Kind.raises, ())
    }
    for name in sorted(raised - documented):
        if documented.isdisjoint(_error_bases(target.module, name)):
            yield _line(target, f"{name} in Raises")


def _error_bases(module: griffe.Module, name: str) -> set[str]:
    """Return the base classes of an error; for one that a call makes, the names in the call."""
    error = definition_of(module[name]) if name in module.members else None
    if isinstance(error, griffe.Class):
        return {base.name for base in _own_bases(error)}
    return (
        set(re.findall(r"\w+", str(error.value))) if isinstance(error, griffe.Attribute) else set()
    )


def _check_examples(target: griffe.Object) -> Iterator[str]:
    if Kind.examples not in _sections(target):
        yield _line(target, "Examples")


@cache
def _sections(target: griffe.Object) -> dict[griffe.DocstringSectionKind, list[Any]]:
    """Return the items of each section of a docstring."""
    if target.docstring is None:
        return {}
    parsed = target.docstring.parse("google", warnings=False, returns_multiple_items=False)
    return {section.kind: section.value for section in parsed}


def _line(target: griffe.Object, lack: str) -> str:
    owner = _owner(target)
    name = f"{owner.name}.{target.name}" if isinstance(owner, griffe.Class) else target.name
    return f"{_file(target)}:{target.lineno}: {name} lacks {lack}"


def _owner(target: griffe.Object) -> griffe.Object:
    """Return the class or module that defines a name."""
    return target.parent or target


def _file(target: griffe.Object) -> Path:
    path = target.filepath
    if isinstance(path, list):  # of a folder without __init__.py, which `load` never reads
        path = path[0]
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _is_exception(target: griffe.Class) -> bool:
    own = (target, *_own_bases(target))
    names = [str(base).rpartition(".")[2] for each in own for base in each.bases]
    found = [getattr(builtins, name, None) for name in names]
    return any(isinstance(each, type) and issubclass(each, BaseException) for each in found)


def _own_bases(target: griffe.Class) -> list[griffe.Class]:
    """Return the base classes that the packages define, nearest first."""
    return target.mro()


def _protocols(target: griffe.Class) -> Iterator[griffe.Class]:
    """Yield the public protocols of a class's package that it fulfils."""
    for name in _exported(target.package):
        each = definition_of(target.package[name])
        if isinstance(each, griffe.Class) and each is not target and _is_protocol(each):
            methods = {name for name in each.members if not name.startswith("_")}
            if methods <= target.all_members.keys():
                yield each


def _is_protocol(target: griffe.Class) -> bool:
    return any(str(base).partition("[")[0] == "Protocol" for base in target.bases)


def public_members(target: griffe.Class) -> Iterator[griffe.Object]:
    """Yield the public methods and properties of a class and of its private bases."""
    private = [base for base in _own_bases(target) if base.name.startswith("_")]
    seen: set[str] = set()
    for owner in (target, *private):
        for name, member in owner.members.items():
            if name.startswith("_") or name in seen or isinstance(member, griffe.Alias):
                continue
            seen.add(name)
            if isinstance(member, griffe.Function) or "property" in member.labels:
                yield member


def _has_result(target: griffe.Function) -> bool:
    """Return whether a function returns or yields something else than None."""
    returned = str(target.returns or "")
    node = _body(_owner(target), target.name)
    if node is not None and any(isinstance(part, ast.Yield) for part in _walk(node)):
        returned = returned.partition("[")[2].rstrip("]").partition(",")[0]
    return returned not in NO_RESULT


def _raised(owner: griffe.Object, name: str, *, follow: bool = True) -> set[str]:
    """Return the names of the errors that a function raises itself or through private functions."""
    node = _body(owner, name)
    found: set[str] = set()
    for part in _walk(node) if node is not None else ():
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
            raised = ast.unparse(part.exc.func).rpartition(".")[2]
            if raised[0].isupper() and raised not in NOT_DOCUMENTED:
                found.add(raised)
        elif follow and isinstance(part, ast.Call):
            called = part.func
            if isinstance(called, ast.Name) and called.id.startswith("_"):
                found |= _raised(owner.module, called.id, follow=False)
            elif ast.unparse(called).startswith(("self._", "cls._")):
                found |= _raised(owner, ast.unparse(called).partition(".")[2], follow=False)
    return found


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function runs: no inner functions, and no ``try`` with handlers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(child, ast.Try) and child.handlers:
            for part in (*child.handlers, *child.orelse, *child.finalbody):
                yield part
                yield from _walk(part)
            continue
        yield child
        yield from _walk(child)


def _body(owner: griffe.Object, name: str) -> ast.FunctionDef | None:
    """Return the syntax tree of a function of a module or class, the last one if overloaded."""
    return _functions(_file(owner)).get((owner.name if owner.is_class else "", name))


@cache
def _functions(path: Path) -> dict[tuple[str, str], ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [(node.name, node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        (name, node.name): node
        for name, body in (("", tree.body), *classes)
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


def main() -> None:
    """Read the command line and print the lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="DIR", help="holds packages")
    lines = check(parser.parse_args().sources)
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
