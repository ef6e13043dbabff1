"""Changelogs and their fragments, which towncrier turns into the section of a release."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
TYPES = [
    kind["directory"]
    for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


@each_package
def test_fragments_have_a_slug_and_a_known_type(package: Path) -> None:
    name = re.compile(rf"[a-z0-9-]+\.({'|'.join(TYPES)})\.md")
    fragments = {path.name for path in (package / "changelog.d").iterdir()} - {".gitkeep"}
    assert [found for found in sorted(fragments) if not name.fullmatch(found)] == []


@each_package
def test_fragments_are_one_sentence_in_one_line(package: Path) -> None:
    for path in (package / "changelog.d").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        assert re.fullmatch(r"\S.*\.\n", text), f"{path.name}: use one line that ends with a period"
        assert not re.search(r"\. [A-Z`]", text), f"{path.name}: use one sentence"


@each_package
def test_changelog_has_a_section_for_the_current_version(package: Path) -> None:
    (source,) = package.glob("src/*/__init__.py")
    version = re.search(r'^__version__ = "(.+)"$', source.read_text(encoding="utf-8"), re.M)
    assert version is not None
    changelog = (package / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(version[1])} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M)


@each_package
def test_sections_have_known_types_in_order_and_at_most_60_lines(package: Path) -> None:
    changelog = (package / "CHANGELOG.md").read_text(encoding="utf-8")
    names = [kind.capitalize() for kind in TYPES]
    for section in changelog.split("\n## ")[1:]:
        headings = re.findall(r"^### (.+)$", section, re.M)
        assert headings == [name for name in names if name in headings]
        assert len(section.strip().splitlines()) <= 60
