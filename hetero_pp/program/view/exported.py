"""Writes the page with its data as one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_pp.core.files import write_whole
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.server import PAGE, run_of
from hetero_pp.program.view.sources import Source

MOST_FRAMES = 300
"""Key frames of each run in the file."""

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:const|let|class|function|async function) (\w+))", re.MULTILINE)


def export_page(sources: Mapping[str, Source], path: Path) -> None:
    """Write the page of these runs to a file. Raises OSError."""
    write_whole(path, page_of(PAGE, data_of(sources)).encode())


def data_of(sources: Mapping[str, Source]) -> str:
    """Return the runs, their histories and frames, and predictions, as JSON without any `<`."""
    views = {name: source.view for name, source in sources.items()}
    found: dict[str, Any] = {
        "runs": [run_of(name, source) for name, source in sources.items()],
        "histories": {name: view.history(name) for name, view in views.items() if view is not None},
        "predictions": {name: source.prediction for name, source in sources.items() if source.prediction is not None},
    }
    frames = ", ".join(
        f"{to_json(name)}: [{', '.join([*view.key_frames.some(MOST_FRAMES), view.frame()])}]"
        for name, view in views.items()
        if view is not None
    )
    return f'{to_json(found)[:-1]}, "frames": {{{frames}}}}}'.replace("<", "\\u003c")


def page_of(folder: Path, data: str) -> str:
    """Return the page in a folder with its files inlined, and the data in it.

    Its content security policy allows these scripts and styles by their hashes, and nothing else.
    """
    html, hashes = (folder / "index.html").read_text(encoding="utf-8"), dict[str, list[str]](script=[], style=[])

    def inline(tag: str, text: str, attributes: str = "") -> str:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}{attributes}>{text}</{tag}>"

    def script(match: re.Match[str]) -> str:
        name = match["name"]
        if "module" in match[0]:
            return inline("script", bundle(folder, name), ' type="module"')
        return inline("script", (folder / name).read_text(encoding="utf-8"))

    html = re.sub(r'<script src="page/(?P<name>[\w.-]+)"[^>]*></script>', script, html)
    html = re.sub(
        r'<link rel="stylesheet" href="page/([\w.-]+)">',
        lambda match: inline("style", (folder / match[1]).read_text(encoding="utf-8")),
        html,
    )
    html = re.sub(r'href="page/([\w.-]+\.svg)"', lambda match: f'href="{_data_url(folder / match[1])}"', html)
    policy = "; ".join(
        ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
        + [f"{tag}-src {' '.join(found)}" for tag, found in hashes.items()]
    )
    head = f'<meta charset="utf-8">\n    <meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = html.replace('<meta charset="utf-8">', head, 1)
    return html.replace("</body>", f'<script type="application/json" id="data">{data}</script>\n  </body>', 1)


def bundle(folder: Path, name: str) -> str:
    """Return a module with all modules that it imports as one: each is a function that returns what it exports."""
    parts = [
        f"(() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})()" for _, body, exports in _modules(folder, name)
    ]
    names = [module for module, _, _ in _modules(folder, name)]
    lines = [f"modules[{to_json(module)}] = {part};" for module, part in zip(names, parts, strict=True)]
    return "\n".join(["const modules = {};", *lines])


def _modules(folder: Path, name: str, seen: set[str] | None = None) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (name, body, exported names) of a module and its imports, each after those that it imports."""
    seen = set() if seen is None else seen
    if name in seen:
        return
    seen.add(name)
    text = (folder / name).read_text(encoding="utf-8")
    for found in _IMPORT.finditer(text):
        yield from _modules(folder, found[2], seen)
    body = _IMPORT.sub(
        lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = modules[{to_json(match[2])}];", text
    )
    yield name, _EXPORT.sub("", body), [match[1] for match in _EXPORT.finditer(body)]


def _data_url(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
