"""`hetero-pp view`: shows runs on a page, or writes the page to a file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.lines import is_loopback
from hetero_pp.config.overrides import Given
from hetero_pp.config.yaml_file import ConfigFile, read_run, spec_of
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.files import write_whole
from hetero_pp.core.text import is_ticket
from hetero_pp.core.units import format_count
from hetero_pp.program.join.membership import known_run, memberships_in, runs_at
from hetero_pp.program.report.output import announce
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.prediction import PredictedStep
from hetero_pp.program.view.server import LOOPBACK, PAGE, Authenticator, Served, authenticator_of, run_of
from hetero_pp.program.view.sources import Record, Source, Watched

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
MOST_FRAMES = 300  # key frames of each run in a file
_SECONDS_TO_READ = 600.0  # longest time for reading a record that is exported


def view(runs: Path, named: Sequence[str], listen: str, export: Path | None) -> None:
    """Serve the page of these runs until an interrupt, or write it to a file.

    Raises ConfigError for a name that is no run, and for an address that cannot be opened.
    """
    folders, authenticators = list[RunFolder](), list[Authenticator]()
    for name in named:
        is_address = ":" in name and not is_ticket(name) and not Path(name).is_dir()
        folders.append(runs_at(runs.absolute(), name)[0].folder if is_address else run_folder(runs.absolute(), name))
    for folder in [] if is_loopback(listen) else folders:
        with suppress(HeteroPPError):  # this host neither serves nor has joined the run
            authenticators.append(authenticator_of(known_run(folder)))
    show(sources_of(folders), listen, export, authenticators)


def show(
    sources: Mapping[str, Source],
    listen: str = LOOPBACK,
    export: Path | None = None,
    authenticators: Sequence[Authenticator] = (),
) -> None:
    """Serve the page of some sources until an interrupt, or write it to a file."""
    served = None if export is not None else Served(sources, listen, authenticators)
    with ExitStack() as stack:
        for source in sources.values():
            source.start()
            stack.callback(source.close)
        if served is None and export is not None:
            for name, source in sources.items():
                if not source.wait(_SECONDS_TO_READ) and source.view is not None:
                    minutes = f"{_SECONDS_TO_READ / 60:.0f} minutes"
                    source.view.complain(f"the record was read for {minutes}, not to its end: the rest is missing")
                problems = [] if source.view is None else source.view.problems
                more = (
                    f"; the page lists {format_count(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
                )
                if problems:
                    announce(f"{name}: {problems[0]}{more}")
            write_whole(export, self_contained(data_of(sources)).encode())
            announce(f"{', '.join(sources)}: the page is in {export}")
        elif served is not None:
            announce(f"{', '.join(sources)}: {served.url} (Ctrl-C ends the page)")
            served.run()


def sources_of(folders: Sequence[RunFolder]) -> dict[str, Source]:
    """Return the runs by the names that the page uses: records on this host, else what exchanges tell.

    Raises ConfigError for a folder without a record and without a membership.
    """
    found: dict[str, Source] = {}
    for folder in folders:
        name, number = folder.path.resolve().name, 2
        label = name
        while label in found:
            label, number = f"{name} ({number})", number + 1
        if folder.config.is_file():
            found[label] = Record(folder)
            continue
        for membership in memberships_in(folder):
            own = RunFolder(folder.path, f"config-{membership.slot}.yaml")
            if own.config.is_file():
                found[label] = Watched(read_run(own), membership, folder)
                break
        else:
            told = "found no record of a run and no membership, expected one of them"
            raise ConfigError((), f"{folder.path}: {told}")
    return found


def show_prediction(path: Path, overrides: Sequence[Given], runs: Path) -> None:
    """Serve the page of a YAML's prediction until an interrupt, with the run of its name or else its rehearsal."""
    file = ConfigFile(path, overrides)
    spec = spec_of(file)
    folders = [RunFolder(runs / name) for name in (spec.config.name, spec.config.rehearsal_name)]
    try:
        step = PredictedStep(spec)
    except ConfigError as error:
        raise file.located(error) from None
    record = next((Record(folder, step) for folder in folders if folder.config.is_file()), None)
    show({spec.config.name: record or Source(None, step)})


# ---- the page in one file ----


def data_of(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return the runs, their histories and frames, and predictions, in the form that the page reads."""
    views = {name: source.view for name, source in sources.items() if source.view is not None}
    predictions = {name: source.prediction() for name, source in sources.items()}
    found = {
        "runs": [run_of(name, source) for name, source in sources.items()],
        "histories": {name: view.history(name) for name, view in views.items()},
        "predictions": {name: one for name, one in predictions.items() if one is not None},
        "frames": {
            name: [json.loads(frame) for frame in [*view.key_frames.some(MOST_FRAMES), view.frame()]]
            for name, view in views.items()
        },
    }
    shown: dict[str, Any] = json.loads(to_json(found))  # numbers that are not finite become null
    return shown


def self_contained(data: Mapping[str, object]) -> str:
    """Return the page as one HTML text with `data` in it, in the form that page/source.js reads.

    The content security policy allows these scripts and styles by their hashes, and nothing from elsewhere.
    """
    script = ""
    for name in _in_order("app", []):  # each module becomes a function that is called once and returns its exports
        text = _read(f"{name}.js")
        body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};", text)
        body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
        exported = ", ".join(_EXPORTED.findall(text))
        script += f"const module_{name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n"
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
    return (PAGE / name).read_text(encoding="utf-8")


def _in_order(name: str, found: list[str]) -> list[str]:
    """Append a module behind all that it imports."""
    for _, other in _IMPORT.findall(_read(f"{name}.js")):
        if other not in found:
            _in_order(other, found)
    found.append(name)
    return found


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
