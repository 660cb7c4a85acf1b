"""A page that a test has opened."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from playwright.sync_api import Page


class OpenPage(Protocol):
    """Opens an address in a new tab."""

    def __call__(self, address: str, width: int = 1280, dark: bool = False) -> Page:
        """Return the page once the run is shown."""


def as_file(text: str, folder: Path, name: str = "page.html") -> str:
    """Write a page and return its address."""
    path = folder / name
    path.write_text(text)
    return path.as_uri()
