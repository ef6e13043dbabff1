"""A mistake in a page, a reference or a file of results makes the build fail."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from public_names import public_names
from pymdownx.snippets import SnippetMissingError
from results import results

CONFIG = Path(__file__).parents[1] / "mkdocs.yml"
REFERENCE = CONFIG.parent / "pages" / "hp-ep" / "reference.md"

pytestmark = pytest.mark.filterwarnings("default")  # those of mkdocs and its plugins


def built(pages: dict[str, str], tmp_path: Path, nav: list[str] | None = None) -> Path:
    """Build a small site with the configuration of the real one; return its folder."""
    docs, site = tmp_path / "pages", tmp_path / "site"
    for name, text in {**pages, "site.css": ""}.items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(text, encoding="utf-8")
    shown: Any = [{"Pages": nav or [name for name in pages if name.endswith(".md")]}]
    config = load_config(str(CONFIG), docs_dir=str(docs), site_dir=str(site), nav=shown)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return site


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    """Return all warnings of a build."""
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def test_each_mistake_in_a_page_is_a_warning_and_warnings_fail_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    links = "[guide](guide.md), [below](#below), [absolute](/index.md)"
    pages = {
        "index.md": f"# A\n\n{links}\n",
        "lost.md": "# B\n",
        "hp-ep/benchmarks.md": "# C\n\n<!-- results: nothing -->\n",
    }
    nav = ["index.md", "missing.md", "hp-ep/benchmarks.md"]
    with pytest.raises(Abort, match="6 warnings"):
        built(pages, tmp_path, nav)
    found = warnings_of(caplog)
    assert "'guide.md', but the target is not found" in found
    assert "'#below', but there is no such anchor" in found
    assert "absolute link '/index.md'" in found
    assert "missing.md" in found
    assert "lost.md" in found
    assert "hp-ep/benchmarks.md: hp-ep has no benchmark nothing" in found


def test_a_snippet_that_does_not_exist_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(SnippetMissingError, match=r"hp-ep/missing\.svg"):
        built({"index.md": '# A\n\n--8<-- "hp-ep/missing.svg"\n'}, tmp_path)


def test_a_reference_that_lacks_a_public_name_fails_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = REFERENCE.read_text(encoding="utf-8")
    without = whole.replace("::: hp_ep.choose_capacity\n", "")
    assert without != whole
    with pytest.raises(Abort):
        built({"hp-ep/reference.md": without}, tmp_path)
    assert "hp-ep/reference.md lacks the public name hp_ep.choose_capacity" in warnings_of(caplog)


def test_a_guide_of_a_topic_is_in_the_navigation_without_an_entry_of_its_own(
    tmp_path: Path,
) -> None:
    pages = {"hp-ep/guide.md": "# Guide\n", "hp-ep/guide-routers.md": "# Routers\n"}
    site = built(pages, tmp_path, nav=["hp-ep/guide.md", "hp-ep/guide-*.md"])
    assert "guide-routers.html" in (site / "hp-ep" / "guide.html").read_text(encoding="utf-8")


def test_a_drawing_is_inline_also_with_blank_lines(tmp_path: Path) -> None:
    drawing = '<svg viewBox="0 0 1 1">\n<title>T</title>\n\n<text>*a*</text>\n</svg>\n'
    pages = {"index.md": '# A\n\n--8<-- "hp-ep/drawing.svg"\n', "hp-ep/drawing.svg": drawing}
    page = (built(pages, tmp_path) / "index.html").read_text(encoding="utf-8")
    assert drawing.strip() in page


def test_drawings_of_the_pages_are_inline_and_have_the_colours_of_the_page() -> None:
    pages = CONFIG.parent / "pages"
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages.rglob("*.md"))
    for path in pages.rglob("*.svg"):
        assert f'--8<-- "{path.relative_to(pages).as_posix()}"' in text
        drawing = path.read_text(encoding="utf-8")
        assert drawing.startswith("<svg ")
        assert "var(--md-default-fg-color" in drawing
        assert "#ffffff" not in drawing


def test_a_changelog_is_below_the_heading_of_its_package(tmp_path: Path) -> None:
    site = built({"index.md": "# Changelogs\n\n<!-- changelog: hp-ep -->\n"}, tmp_path)
    page = (site / "index.html").read_text(encoding="utf-8")
    assert '<h2 id="hp-ep">' in page
    assert page.count("<h1") == 1


def test_a_recipe_is_shown_from_its_file(tmp_path: Path) -> None:
    site = built({"index.md": "# Recipes\n\n<!-- recipe: dense -->\n"}, tmp_path)
    assert "load_microbatch" in (site / "index.html").read_text(encoding="utf-8")


def package(sources: Path, module: str) -> None:
    """Write a package ``hp_new`` in which one module defines all."""
    folder = sources / "hp-new" / "src" / "hp_new"
    folder.mkdir(parents=True)
    (folder / "_all.py").write_text(module, encoding="utf-8")
    init = '_LATER = {"B": "._all"}\nif True:\n    from ._all import A as A\n'
    init += '    from ._all import B as B\n__all__ = ["A", *_LATER]\n'
    (folder / "__init__.py").write_text(init, encoding="utf-8")


def test_public_names_are_those_of_all_with_lazy_names_and_methods(tmp_path: Path) -> None:
    package(
        tmp_path,
        "class _Base:\n    def run(self): ...\n\n"
        'class A(_Base):\n    """Doc."""\n    def stop(self):\n        """Doc."""\n\n'
        "def B(): ...\n",
    )
    found = {name.paths[0]: name.documented for name in public_names("hp_new", tmp_path)}
    assert found == {
        "hp_new.A": True,
        "hp_new.A.run": False,  # its base is private, so no other page has it
        "hp_new.A.stop": True,
        "hp_new.B": False,
    }


def measured(root: Path, **result: Any) -> None:
    """Write a benchmark of hp-new and its results."""
    folder = root / "packages" / "hp-new" / "benchmarks"
    (folder / "results").mkdir(parents=True, exist_ok=True)
    (folder / "bench_step.py").write_text('"""Times a step.\n\nDetails."""\n', encoding="utf-8")
    (folder / "results" / "step.json").write_text(json.dumps(result), encoding="utf-8")


def test_results_are_a_chart_and_a_table(tmp_path: Path) -> None:
    row = {"name": "a | b", "ours": 10.0, "peer": 12.5, "unit": "ms", "against": "torch"}
    rows = [{**row, "ratio": 0.8, "low": 0.7, "high": 0.9}, {"name": "alone", "ours": 3.0}]
    facts = {"date": "2026-01-02", "machine": "a machine", "versions": {"torch": "2.13"}}
    measured(tmp_path, **facts, rows=rows)
    text = results("hp-new", "step", tmp_path)
    assert "Times a step." in text
    assert "Measured on 2026-01-02 with a machine; torch 2.13." in text
    assert "| a &#124; b | 10 ms | 12.5 ms | torch | 0.80 (0.70 to 0.90) |" in text
    assert text.count("<rect") == 1
    assert "1 = peer; left is better" in text
    measured(tmp_path, **facts, rows=[{**row, "against": "published", "ratio": 0.8}])
    assert "1 = published figure" in results("hp-new", "step", tmp_path)


def test_results_without_a_date_or_of_no_benchmark_are_refused(tmp_path: Path) -> None:
    measured(tmp_path, rows=[])
    with pytest.raises(ValueError, match="lacks"):
        results("hp-new", "step", tmp_path)
    with pytest.raises(ValueError, match="hp-new has no benchmark stop; use gpu, step"):
        results("hp-new", "stop", tmp_path)
    (tmp_path / "packages/hp-new/benchmarks/bench_step.py").unlink()
    with pytest.raises(ValueError, match="no benchmark of that name"):
        results("hp-new", None, tmp_path)
