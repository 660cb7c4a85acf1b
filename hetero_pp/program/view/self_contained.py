"""One HTML file with the page, its styles, its scripts and the data of runs: it opens from disk, without a server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files

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
