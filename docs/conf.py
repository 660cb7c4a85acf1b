"""Build the pages as a site, with Sphinx: `make docs`.

The source folder is the repository, so links to any of its files work. Sphinx, MyST and Furo are maintained. MkDocs is
not, and its theme Material ends in May 2027. Nothing is loaded from other hosts: Furo uses the fonts of the reader's
system, and the search runs in the browser.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from papers import PAPERS, anchor, page  # noqa: E402 (it lies beside this file)

project = "hetero-pp"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
highlight_language = "none"
nitpicky = True
smartquotes = False  # it makes one dash of `--`
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options: dict[str, list[str]] = {"footer_icons": []}

PAGES = "docs/results"
"""Folder of the pages of results, which are written before each build."""
_SECTION = re.compile(r"^\*\*(.+?)\*\*.*?\n\n((?:[- ] .*\n)+)", re.MULTILINE)
_TABLE = re.compile(r"\]\(\.\./benchmarks/results/([\w-]+/([\w-]+)/\w+)\.md\)")


def setup(app: Sphinx) -> None:
    """Register what is done before and while pages are read."""
    app.connect("builder-inited", _write_papers)
    app.connect("source-read", _change)
    app.connect("build-finished", _add_index)


def _write_papers(app: Sphinx) -> None:
    for name in PAPERS:
        path = ROOT / PAGES / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        text = page(ROOT / "benchmarks" / "results", name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _change(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the navigation to the first page, and lead links to tables to the pages of results."""
    if name == root_doc:
        source[0] += "".join(_navigation())
    source[0] = _TABLE.sub(lambda found: f"](results/{_paper(found[2])}.md#{anchor(found[1])})", source[0])


def _add_index(app: Sphinx, error: Exception | None) -> None:
    """Serve the first page under the name that servers of files look for, too."""
    if error is None:
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def _paper(family: str) -> str:
    return family if family in PAPERS else "ours"


def _navigation() -> list[str]:
    """Return a table of contents for each section of docs/README.md, and one for the project."""
    sections = _SECTION.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    found = {title: [f"docs/{name}" for name in re.findall(r"\]\(([\w/.-]+)\.md\)", text)] for title, text in sections}
    found["Reproduction"][1:1] = [f"{PAGES}/{name}" for name in PAPERS]
    found["Project"] = ["docs/README", "CHANGELOG", "CONTRIBUTING"]
    return [
        "\n".join(["\n", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"])
        for title, pages in found.items()
    ]
