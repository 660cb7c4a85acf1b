"""`hetero-pp view`: shows runs on a page of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.program.view.record import Record
from hetero_pp.program.view.serving import Served
from hetero_pp.program.view.sources import Source
from hetero_pp.run.folder import RunFolder


def view(runs: Path, named: Sequence[str], port: int) -> None:
    """Serve the page of these runs until an interrupt. Raises ConfigError for a name that is no run."""
    sources = sources_of(runs, named)
    served = Served(sources, port=port)
    with ExitStack() as stack:
        for source in sources.values():
            source.start()
            stack.callback(source.close)
        tell(standard_output(), f"{', '.join(sources)}: {served.url} (Ctrl-C ends it)")
        served.run()


def sources_of(runs: Path, named: Sequence[str]) -> dict[str, Source]:
    """Return the runs by the names that the page uses. Raises ConfigError."""
    found: dict[str, Source] = {}
    for name in named:
        folder = _folder(runs, name)
        label = folder.path.resolve().name
        while label in found:
            label += "'"
        found[label] = Record(folder)
    return found


def _folder(runs: Path, name: str) -> RunFolder:
    for path in (runs / name, Path(name)):
        if RunFolder(path).config.is_file():
            return RunFolder(path)
    raise ConfigError((), f"{name}: found no run, expected a name in {runs}/ or a run folder")
