"""Takes the pictures of docs/operating.md: every view of a page, dark and light, wide and narrow.

hetero-pp view faulty quickstart --export page.html
python docs/take_pictures.py page.html --time 37
hetero-pp simulate configs/quickstart.yaml --view    # prints its address
python docs/take_pictures.py ADDRESS --only prediction
"""

from __future__ import annotations

import io
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent / "images" / "view"
SIZES = {"wide": (1440, 900), "narrow": (360, 740)}
TALLEST = 1400
VIEWS = {
    "topology": "view=topology",
    "member": "view=topology&select=member:{member}",
    "rounds": "view=rounds",
    "comparison": "view=compare",
    "prediction": "view=prediction",
}


def take(
    page: Annotated[str, typer.Argument(help="An exported page, or the address of a server.")],
    time: Annotated[float | None, typer.Option(help="Seconds of the run at which the topology is shown.")] = None,
    member: Annotated[str, typer.Option(help="Member whose panel is opened.")] = "home.1",
    run: Annotated[str | None, typer.Option(help="Run that is shown; by default the first one.")] = None,
    only: Annotated[str | None, typer.Option(help="Take pictures of this view only.")] = None,
    prefix: Annotated[str, typer.Option(help="Begin the names of the pictures with this.")] = "",
    folder: Annotated[Path, typer.Option(help="Write the pictures into this folder.")] = FOLDER,
) -> None:
    """Write pictures of a page, with 128 colours each."""
    address = page if page.startswith("http") else Path(page).resolve().as_uri()
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for view, size, theme in product([only] if only else VIEWS, SIZES, ("light", "dark")):
            fragment = VIEWS[view].format(member=member)
            if run is not None:
                fragment += f"&run={run}"
            if time is not None and view in ("topology", "member"):
                fragment += f"&time={time}"
            picture = _picture(browser, f"{address}#{fragment}", SIZES[size], theme)
            picture.save(folder / f"{prefix}{view}-{size}-{theme}.png", optimize=True)


def _picture(browser: Browser, address: str, size: tuple[int, int], theme: str) -> Image.Image:
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.goto(address)
    page.locator("#loading").wait_for(state="hidden")
    page.locator("main > section:not([hidden]) h2").first.wait_for()
    height = min(TALLEST, page.evaluate("document.body.scrollHeight"))
    page.set_viewport_size({"width": size[0], "height": max(size[1], height)})
    page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    page.close()
    return shot.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


if __name__ == "__main__":
    typer.run(take)
