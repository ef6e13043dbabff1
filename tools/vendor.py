"""Copy packages, and the siblings they need, into another project's tree.

    python tools/vendor.py hp-cp hp-ep --into foo/_vendor --namespace foo._vendor

Packages import their own modules relatively, so only imports of siblings change: ``from hp_dtensor
import ...`` becomes ``from foo._vendor.hp_dtensor import ...``. A copy that is there already stays
if it is the same, and is replaced with ``--replace``. ``--tests`` copies one package's tests too.
"""

import argparse
import ast
import filecmp
import keyword
import re
import shutil
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "packages"


class VendorError(ValueError):
    """A target or a namespace that the copies cannot have."""


def needed(package: str) -> list[str]:
    """Return ``package`` and every sibling that it declares, far ones included."""
    text = (PACKAGES / package / "pyproject.toml").read_text(encoding="utf-8")
    declared: list[str] = tomllib.loads(text)["project"]["dependencies"]
    names = [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in declared]
    near = [name for name in names if (PACKAGES / name).is_dir()]
    return list(dict.fromkeys([package, *(far for name in near for far in needed(name))]))


def rewrite(source: str, modules: list[str], namespace: str) -> str:
    """Return ``source`` with its absolute imports of ``modules`` moved under ``namespace``."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in modules:
                    raise VendorError(
                        f"line {node.lineno}: 'import {alias.name}' cannot be moved; "
                        f"write 'from {alias.name} import ...'"
                    )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = str(node.module)
            if module.partition(".")[0] in modules:
                before, word, after = lines[node.lineno - 1].partition(module)
                lines[node.lineno - 1] = f"{before}{namespace}.{word}{after}"
    return "".join(lines)


def copy(
    packages: Sequence[str],
    into: Path,
    namespace: str,
    tests: Path | None = None,
    *,
    replace: bool = False,
) -> None:
    """Copy ``packages`` and their siblings below ``into``, which is imported as ``namespace``.

    Raises `VendorError`, before anything is written, for a namespace that Python cannot import and
    for targets that hold something else.
    """
    parts = namespace.split(".")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise VendorError(
            f"namespace={namespace!r} is no dotted import name; use one like yourframework._vendor"
        )
    if tests is not None and len(packages) != 1:
        raise VendorError(f"tests of one package at a time, got {list(packages)}")
    names = list(dict.fromkeys(name for package in packages for name in needed(package)))
    modules = {name: name.replace("-", "_") for name in names}
    with tempfile.TemporaryDirectory() as folder:
        ready: dict[Path, Path] = {}
        for name, module in modules.items():
            ready[into / module] = Path(folder) / module
            shutil.copytree(
                PACKAGES / name / "src" / module,
                Path(folder) / module,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            shutil.copy(PACKAGES / name / "LICENSE", Path(folder) / module)
        if tests is not None:
            ready[tests] = Path(folder) / "tests"
            shutil.copytree(
                PACKAGES / packages[0] / "tests",
                ready[tests],
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(rewrite(text, list(modules.values()), namespace), encoding="utf-8")
        present = [target for target, made in ready.items() if target.exists()]
        differing = [target for target in present if not _same(target, ready[target])]
        if differing and not replace:
            raise VendorError(
                f"{', '.join(map(str, differing))}: there already, and not the same; "
                "remove it or pass --replace"
            )
        for target in differing:
            shutil.rmtree(target)
        for target, made in ready.items():
            if not target.exists():
                shutil.copytree(made, target)


def _same(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files, compiled ones aside."""
    files = [
        {
            p.relative_to(root)
            for p in root.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }
        for root in (one, other)
    ]
    return files[0] == files[1] and all(
        filecmp.cmp(one / path, other / path, shallow=False) for path in files[0]
    )


def main() -> None:
    """Read the command line and copy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = sorted(path.name for path in PACKAGES.iterdir())
    add = parser.add_argument
    add("packages", nargs="+", choices=known, metavar="PACKAGE", help=", ".join(known))
    add("--into", type=Path, required=True, metavar="DIR", help="folder for the copies")
    add("--namespace", required=True, metavar="NAME", help="import name of that folder")
    add("--tests", type=Path, metavar="DIR", help="folder for a copy of one package's tests")
    add("--replace", action="store_true", help="overwrite copies that differ")
    given = parser.parse_args()
    try:
        copy(given.packages, given.into, given.namespace, given.tests, replace=given.replace)
    except (VendorError, OSError) as error:
        parser.exit(2, f"vendor: error: {error}\n")


if __name__ == "__main__":
    main()
