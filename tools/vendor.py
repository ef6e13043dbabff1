"""Copy a package, and the siblings it needs, into another project's tree.

    python tools/vendor.py hp-dtensor --into foo/_vendor --namespace foo._vendor

Packages import their own modules relatively, so only imports of siblings change: ``from hp_mesh
import ...`` becomes ``from foo._vendor.hp_mesh import ...``. ``--tests`` copies the tests as well.
"""

import argparse
import ast
import re
import shutil
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "packages"


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
                    raise SystemExit(
                        f"line {node.lineno}: 'import {alias.name}' cannot be moved; "
                        f"write 'from {alias.name} import ...'"
                    )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = str(node.module)
            if module.partition(".")[0] in modules:
                before, word, after = lines[node.lineno - 1].partition(module)
                lines[node.lineno - 1] = f"{before}{namespace}.{word}{after}"
    return "".join(lines)


def copy(package: str, into: Path, namespace: str, tests: Path | None = None) -> None:
    """Copy ``package`` and its siblings below ``into``, which is imported as ``namespace``."""
    packages = needed(package)
    modules = {name: name.replace("-", "_") for name in packages}
    copies = {PACKAGES / name / "src" / modules[name]: into / modules[name] for name in packages}
    if tests is not None:
        copies[PACKAGES / package / "tests"] = tests
    for source, target in copies.items():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in target.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(rewrite(text, list(modules.values()), namespace), encoding="utf-8")
    for name in packages:
        shutil.copy(PACKAGES / name / "LICENSE", into / modules[name] / "LICENSE")


def main() -> None:
    """Read the command line and copy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", choices=sorted(path.name for path in PACKAGES.iterdir()))
    parser.add_argument("--into", type=Path, required=True, help="folder for the copies")
    parser.add_argument("--namespace", required=True, help="import name of that folder")
    parser.add_argument("--tests", type=Path, help="folder for a copy of the package's tests")
    arguments = parser.parse_args()
    copy(arguments.package, arguments.into, arguments.namespace, arguments.tests)


if __name__ == "__main__":
    main()
