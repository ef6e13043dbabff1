"""Hooks of the documentation site: navigation, changelogs, recipes, results, references."""

import logging
import re
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from public_names import public_names
from results import results

ROOT = Path(__file__).parents[2]
# With `strict`, each warning fails the build.
log = logging.getLogger("mkdocs.hooks.hp")


class _InlineSvg(Extension):
    """Keeps `svg` elements of a page unchanged, also across blank lines."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.block_level_elements.append("svg")


def on_startup(**_: Any) -> None:
    """Show warnings: a strict build counts those that are shown, and ``--quiet`` hides them."""
    logger = logging.getLogger("mkdocs")
    logger.setLevel(min(logger.level or logging.WARNING, logging.WARNING))


def on_config(config: Any) -> Any:
    """Replace each pattern in the navigation by the pages that exist."""
    pages = Path(config.docs_dir)
    for section in config.nav:
        for name, entries in section.items():
            section[name] = [page for entry in entries for page in _expand(entry, pages)]
    config.markdown_extensions.append(_InlineSvg())
    return config


def _expand(entry: Any, pages: Path) -> list[Any]:
    if isinstance(entry, str) and "*" in entry:
        return [path.relative_to(pages).as_posix() for path in sorted(pages.glob(entry))]
    return [entry]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers of a page by results, changelogs and recipes."""
    folder, nested, _ = page.file.src_uri.partition("/")
    package = folder if nested else "tools"

    def measured(marker: re.Match[str]) -> str:
        try:
            return results(package, marker[1])
        except (ValueError, KeyError) as error:
            log.warning("%s: %s", page.file.src_uri, error)
            return ""

    markdown = re.sub(r"^<!-- results(?:: (\w+))? -->$", measured, markdown, flags=re.MULTILINE)

    def script(marker: re.Match[str]) -> str:
        path = ROOT / "tools" / "recipes" / f"{marker[1]}.py"
        if not path.exists():
            log.warning("%s: no script %s", page.file.src_uri, path.relative_to(ROOT))
            return ""
        return f"```python\n{path.read_text(encoding='utf-8')}```"

    markdown = re.sub(r"^<!-- recipe: (\w+) -->$", script, markdown, flags=re.MULTILINE)
    return re.sub(r"^<!-- changelog: ([\w-]+) -->$", _changelog, markdown, flags=re.MULTILINE)


def _changelog(marker: re.Match[str]) -> str:
    package = marker[1]
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text(encoding="utf-8")
    text = re.sub(r"^# .*$", f"# {package}", text, count=1, flags=re.MULTILINE)
    return re.sub(r"^#", "##", text, flags=re.MULTILINE)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let drawings scroll on narrow screens, and check reference pages."""
    _check_reference(html, page)
    return re.sub(r"<svg .*?</svg>", r'<div class="drawing">\g<0></div>', html, flags=re.DOTALL)


def _check_reference(html: str, page: Any) -> None:
    """Warn of each public name that a reference page lacks, or that has no docstring."""
    folder, _, name = page.file.src_uri.partition("/")
    if name != "reference.md":
        return
    anchors = set(re.findall(r' id="([^"]+)"', html))
    for public in public_names(folder.replace("-", "_")):
        if not anchors & {*public.paths}:
            log.warning("%s lacks the public name %s", page.file.src_uri, public.paths[0])
        if not public.documented:
            log.warning("the public name %s has no docstring", public.paths[0])
