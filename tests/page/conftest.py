"""A browser for the tests of the page, and pages that report what went wrong in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opened_page import OpenPage
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
PATIENCE_MS = 30_000
"""For conditions on a busy machine; no test measures it."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Return Debian's chromium."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[OpenPage]:
    """Open pages, and fail if one of them reported an error."""
    errors: list[str] = []
    pages: list[Page] = []

    def open_page(address: str, width: int = 1280, dark: bool = False) -> Page:
        scheme, size = "dark" if dark else "light", ViewportSize(width=width, height=800)
        page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        pages.append(page)
        page.goto(address)
        expect(page.locator("#loading")).to_be_hidden()
        return page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []
