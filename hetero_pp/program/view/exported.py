"""Writes the page with its scripts, styles and data as one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hetero_pp.core.files import write_whole
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.run_view import Source
from hetero_pp.program.view.server import run_of

MOST_FRAMES = 300
"""Key frames of each run in the file."""


def export_page(sources: Mapping[str, Source], path: Path) -> None:
    """Write the page of these runs to a file. Raises OSError."""
    write_whole(path, self_contained(data_of(sources)).encode())


def data_of(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return the runs, their histories and frames, and predictions, in the form that the page reads."""
    views = {name: source.view for name, source in sources.items() if source.view is not None}
    predictions = {name: source.prediction for name, source in sources.items()}
    found = {
        "runs": [run_of(name, source) for name, source in sources.items()],
        "histories": {name: view.history(name) for name, view in views.items()},
        "predictions": {name: one for name, one in predictions.items() if one is not None},
    }
    frames = {name: [*view.key_frames.some(MOST_FRAMES), view.frame()] for name, view in views.items()}
    shown: dict[str, Any] = json.loads(to_json(found))  # numbers that are not finite become null
    return shown | {"frames": {name: [json.loads(one) for one in found] for name, found in frames.items()}}


IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def self_contained(data: Mapping[str, object]) -> str:
    """Return the page as one HTML text with `data` in it, in the form that page/source.js reads.

    The content security policy allows these scripts and styles by their hashes, and nothing from elsewhere.
    """
    script = "\n".join(_as_function(name) for name in _in_order("app", []))
    scripts = [_read("uplot.js"), script]
    styles = [_read("uplot.css"), _read("style.css")]
    policy = (
        f"default-src 'none'; img-src data:; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {' '.join(map(_hash, styles))}; base-uri 'none'; form-action 'none'"
    )
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    icon = base64.b64encode(_read("icon.svg").encode()).decode()
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        *(f"<style>{style}</style>" for style in styles),
    ]
    end = [
        f'<script type="application/json" id="data">{embedded}</script>',
        f"<script>{scripts[0]}</script>",
        f'<script type="module">{script}</script>',
    ]
    page = re.sub(r"^.*(?:<link|<script) .*\n", "", _read("index.html"), flags=re.MULTILINE)
    page = page.replace('<meta charset="utf-8">', "\n".join(['<meta charset="utf-8">', *head]))
    return page.replace("</body>", "\n".join([*end, "</body>"]))


def _read(name: str) -> str:
    return (files("hetero_pp.program.view") / "page" / name).read_text(encoding="utf-8")


def _in_order(name: str, found: list[str]) -> list[str]:
    """Append a module behind all that it imports."""
    for _, other in IMPORT.findall(_read(f"{name}.js")):
        if other not in found:
            _in_order(other, found)
    found.append(name)
    return found


def _as_function(name: str) -> str:
    """Return a module as a function that is called once and returns what the module exports."""
    text = _read(f"{name}.js")
    exported = ", ".join(_exports(text))
    body = IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};", text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const module_{name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _exports(text: str) -> Iterator[str]:
    yield from EXPORTED.findall(text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
