"""English sentences that every installation has: docstrings of the packages that hetero-pp requires."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from hetero_pp.core.errors import ConfigError

PACKAGES = ("torch", "numpy", "scipy", "sympy", "networkx", "matplotlib")
"""Direct or indirect (through torch) requirements of hetero-pp; none belongs to Python's standard library."""

_LEAST_WORDS = 8
_NOT_PROSE = re.compile(r"\s|>>>|\.\.|:|[-=~^*+|#]{3}")
"""Start of a line that is not prose: indentation, a Python session, a directive, a field, an underline, or a table."""


def package_folders() -> list[Path]:
    """Return the folders of the packages without importing them.

    Raises ConfigError for a package that is not installed.
    """
    folders = []
    for name in PACKAGES:
        found = find_spec(name)
        if found is None or not found.submodule_search_locations:
            expected = f"expected all of {', '.join(PACKAGES)}"
            raise ConfigError(
                ("data", "corpus"), f"found no package {name}, whose docstrings `prose` reads; {expected}"
            )
        folders.append(Path(found.submodule_search_locations[0]).resolve())
    return folders


def prose_of(docstring: str) -> str:
    """Return the paragraphs of a docstring that are whole sentences, each on one line, separated by blank lines."""
    paragraphs = (_sentences(paragraph) for paragraph in re.split(r"\n\s*\n", docstring))
    return "\n\n".join(text for text in paragraphs if text)


def _sentences(paragraph: str) -> str:
    """Return the paragraph on one line, or an empty string if it is code, a list, a heading or a fragment."""
    lines = paragraph.strip("\n").split("\n")
    if any(_NOT_PROSE.match(line) for line in lines):
        return ""
    text = " ".join(line.strip() for line in lines)
    is_whole = text[:1].isupper() and text.endswith((".", "!", "?", ":"))
    return text if is_whole and len(text.split()) >= _LEAST_WORDS else ""
