"""Check that an installed package came from a complete wheel and a complete sdist.

python -P tools/check_wheel.py hp_mesh dist/hp_mesh-0.1.0.tar.gz
"""

import importlib
import importlib.resources
import sys
import tarfile


def main(name: str, sdist: str) -> None:
    """Raise SystemExit naming what is missing."""
    module = importlib.import_module(name)
    if "site-packages" not in str(module.__file__):
        raise SystemExit(f"{name} was imported from {module.__file__}, not from its wheel")
    if not (importlib.resources.files(name) / "py.typed").is_file():
        raise SystemExit(f"the wheel of {name} lacks py.typed")
    with tarfile.open(sdist) as archive:
        files = {path.split("/", 1)[-1] for path in archive.getnames()}
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", f"src/{name}/py.typed"}
    if missing := needed - files:
        raise SystemExit(f"{sdist} lacks {sorted(missing)}")
    print(f"{name} {module.__version__}: wheel and sdist are complete")


if __name__ == "__main__":
    main(*sys.argv[1:])
