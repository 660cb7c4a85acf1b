"""The page of a run while it trains, with a kill: what it shows, and when, by the times of the run's own reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import Error as PlaywrightError
from started import TIMEOUT, Started

from hetero_pp.config.folder import RunFolder
from hetero_pp.program.view.command import sources_of
from hetero_pp.program.view.server import Authenticator, Served
from hetero_pp.rpc.identities import Authority, Identity

pytestmark = [pytest.mark.browser, pytest.mark.starts_processes]

MIXED = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"
LAUNCH_WITH_FAULTS = Path(__file__).parents[2] / "benchmarks/launch_with_faults.py"
MEMBERS = ("dc", "home.0", "home.1", "home.2")
ROUNDS = 16
SECONDS_TO_SHOW = 2.0

DRAWN = """
new MutationObserver(() => {
  const states = {}
  for (const node of document.querySelectorAll("[data-state]")) states[node.dataset.item] = node.dataset.state
  const events = [...document.querySelectorAll("#topology .marks li")].map((line) => line.textContent)
  const time = Number(document.querySelector(".picture").dataset.time)
  window.drawn = [...(window.drawn ?? []), {time, states, events}]
}).observe(document, {subtree: true, attributeFilter: ["data-time"]})
"""
"""Notes what is in the picture and in the list of events whenever another moment is drawn."""


@dataclass
class Watched:
    """A run that ended while a page showed it."""

    folder: Path
    history: dict[str, Any]
    drawn: list[dict[str, Any]]
    tiles: str
    table: str

    @property
    def summary(self) -> dict[str, Any]:
        """The summary that the run left."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def first(self, kind: str, member: str) -> dict[str, Any]:
        """Return the first mark of this kind."""
        return next(mark for mark in self.history["marks"] if mark["kind"] == kind and mark["member"] == member)

    def in_time(self, mark: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield all that was drawn from a mark on, up to the moment at which it must be visible."""
        late = [one for one in self.drawn if one["time"] >= mark["time"] + SECONDS_TO_SHOW]
        yield from (one for one in self.drawn if mark["time"] <= one["time"] < mark["time"] + SECONDS_TO_SHOW)
        yield from late[:1]  # on a busy machine nothing may be drawn in between


@contextmanager
def launched(corpus: Path, runs: Path) -> Iterator[Path]:
    """Start a run in which a stage is killed, and return its folder."""
    (runs / "faults.yaml").write_text(f"faults: [{{kill: home.1, at: {{round: {ROUNDS // 2}, phase: training}}}}]")
    # Rounds need both replicas: otherwise the run may be over before the killed stage is back.
    sets = [f"data.corpus={corpus}", f"outer.rounds={ROUNDS}", "checkpoints.every=1", "exchange.quorum=1"]
    command = [str(MIXED), "--runs", str(runs), "--faults", str(runs / "faults.yaml")]
    run = Started(LAUNCH_WITH_FAULTS, [*command, *(part for one in sets for part in ("--set", one))])
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (runs / "mixed" / "config.yaml").exists():
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()
            time.sleep(0.05)  # a condition of another process, not a delay
        yield runs / "mixed"
        assert run.wait(TIMEOUT) == 0, run.communicate()
    finally:
        run.kill()


@pytest.fixture(scope="module")
def watched(corpus: Path, tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Watched]:
    """Return a run that a page followed from its start to its end, without an error."""
    runs, errors = tmp_path_factory.mktemp("runs"), list[str]()
    with launched(corpus, runs) as folder:
        (source,) = sources_of([RunFolder(folder)]).values()
        source.start()
        served = Served({"mixed": source})
        with served.in_background():
            page = browser.new_page()
            page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.add_init_script(DRAWN)
            page.goto(served.url)
            yield _at_its_end(page, folder, served.url)
            page.close()
        source.close()
    assert errors == []


def _at_its_end(page: Page, folder: Path, url: str) -> Watched:
    expect(page.locator("#phase")).to_have_text("over", timeout=1000 * TIMEOUT)
    expect(page.locator("#topology [data-state=finished]")).to_have_count(len(MEMBERS))
    drawn, tiles = page.evaluate("window.drawn"), page.locator("#tiles").inner_text()
    page.locator('[data-view="rounds"]').click()
    page.locator("#rounds").get_by_text("Losses as a table").click()
    table = page.get_by_role("region", name="Losses").inner_text()
    return Watched(folder, page.request.get(f"{url}api/runs/mixed").json()["history"], drawn, tiles, table)


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_is_shown_within_two_seconds(watched: Watched, member: str) -> None:
    shown = list(watched.in_time(watched.first("joined", member)))
    assert any(one["states"].get(f"member:{member}", "absent") != "absent" for one in shown)


def test_a_kill_is_shown_within_two_seconds(watched: Watched) -> None:
    """On a fast machine later events take its place in the list before it is drawn; then the stage is vacant."""
    mark = watched.first("incarnation_over", "home.1")
    shown = list(watched.in_time(mark))
    is_vacant = any(one["states"].get("member:home.1") == "vacant" for one in shown)
    assert is_vacant or any(mark["text"] in event for one in shown for event in one["events"])


def test_the_numbers_at_the_end_are_those_of_the_summary(watched: Watched) -> None:
    summary = watched.summary
    assert f"{ROUNDS} of {ROUNDS}" in watched.tiles
    assert f"{summary['validation_loss'][-1]:.4f}" in watched.tiles
    assert f"{sum(replica['tokens'] for replica in summary['replicas']):,} tokens" in watched.tiles
    for number, loss in enumerate(summary["validation_loss"], 1):
        shown = "–" if loss is None else f"{loss:.4f}"  # a round without the replica that was killed
        assert any(line.startswith(f"{number}\t") and f"\t{shown}\t" in line for line in watched.table.splitlines())


def test_a_page_keeps_what_it_has_when_its_server_is_gone(watched: Watched, browser: Browser) -> None:
    (source,) = sources_of([RunFolder(watched.folder)]).values()
    source.start()
    served = Served({"mixed": source})
    page = browser.new_page()
    with served.in_background():
        page.goto(served.url)
        expect(page.locator("#phase")).to_have_text("over")
    source.close()
    page.get_by_role("slider").fill("300")
    expect(page.locator("#connection")).to_contain_text("no connection to the server")
    expect(page.locator("#topology [data-state=finished]")).to_have_count(len(MEMBERS))
    page.close()


def test_a_browser_with_a_member_s_certificate_sees_a_run_of_another_machine(
    watched: Watched, browser: Browser
) -> None:
    """Without one, or with that of another run, it sees nothing."""
    authority = Authority("secret")
    (source,) = sources_of([RunFolder(watched.folder)]).values()
    source.start()
    served = Served({"mixed": source}, "0.0.0.0:0", [Authenticator(authority.identity("launcher"), dict)])
    url = served.url.replace("0.0.0.0", "127.0.0.1")
    with served.in_background():
        page = _with_certificate(browser, url, authority.identity("home.1"))
        page.goto(url)
        expect(page.locator("#topology [data-state=finished]")).to_have_count(len(MEMBERS))
        page.get_by_role("slider").fill("300")
        expect(page.locator("#phase")).to_contain_text("replay")
        for other in (None, Authority("another secret").identity("home.1")):
            stranger = _with_certificate(browser, url, other)
            with pytest.raises(PlaywrightError, match="ERR_"):
                stranger.goto(url)
            stranger.context.close()
        page.context.close()
    source.close()


def _with_certificate(browser: Browser, url: str, identity: Identity | None) -> Page:
    """Return a tab that shows a certificate, and does not ask about the server's, which no public authority signed."""
    shown: Any = []
    if identity is not None:
        own = {"cert": identity.certificate.encode(), "key": identity.key.encode()}
        shown = [{"origin": url.strip("/"), **own}]
    return browser.new_context(ignore_https_errors=True, client_certificates=shown).new_page()
