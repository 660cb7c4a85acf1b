"""The server of the page: its answers, its callers, and that no viewer makes another one wait."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from made_up_run import START, begun, inner_step, made_up_reports, membership_event, there
from mixed_run import MIXED
from test_view_data import recorded, run_folder, view_of, wait_until
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError, LinkClosed, RunFailed
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.cli import app
from hetero_pp.program.join.membership import RunOfHost as KnownRun
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from hetero_pp.program.view import server, sources
from hetero_pp.program.view.command import data_of, self_contained
from hetero_pp.program.view.prediction import PredictedStep
from hetero_pp.program.view.run_view import RunView
from hetero_pp.program.view.server import (
    Authenticator,
    EventStream,
    LiveEvents,
    Served,
    authenticator_of,
    on_a_page,
)
from hetero_pp.program.view.sources import Record, Source, Watched
from hetero_pp.rpc.identities import Authority, Identity, as_text, make_ticket, new_key
from replica_groups.exchange.memberships import Memberships

HOSTILE = "</script><script>alert(1)</script><!-- \u2028"


class Known(Source):
    """A run that is over, of which every report is known."""

    view: RunView

    def __init__(self, reports: Sequence[Report]) -> None:
        super().__init__(view_of(reports))
        self.view.end("over", False)

    def prediction(self) -> None: ...


@contextmanager
def served(source: Any, **values: Any) -> Iterator[str]:
    """Yield the address of a run named `a b`."""
    page = Served({"a b": source}, **values)
    with page.in_background():
        yield page.url


def get(url: str, **headers: str) -> tuple[int, Message, bytes]:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def events_of(url: str, names: list[str], data: list[Any]) -> None:
    """Collect the live events of a run until they end."""
    with urllib.request.urlopen(url, timeout=120) as stream:
        for line in stream:
            name, _, value = line.decode().strip().partition(": ")
            if name == "event":
                names.append(value)
            if name == "data":
                data.append(json.loads(value))
            if names and names[-1] == "end" and name == "data":
                return


# ---- what is served ----


@pytest.fixture(scope="module")
def over() -> Iterator[str]:
    with served(Known(made_up_reports())) as url:
        yield url


def test_runs_history_frames_and_live_events(over: str) -> None:
    # Runs history and frames are json.
    assert json.loads(get(over + "api/runs")[2])["runs"] == [
        {"id": "a b", "name": "made-up", "kind": "run", "is_live": False, "predicts": False}
    ]
    found = json.loads(get(over + "api/runs/a%20b")[2])
    history = found["history"]
    assert (history["id"], len(history["rounds"]), history["outcome"]) == ("a b", 2, "over")
    assert json.loads(get(over + "api/runs/a%20b/frame?time=0")[2])["rounds_closed"] == 0
    assert found["frame"]["rounds_closed"] == 2

    # Live events of a run that is over end.
    names, data = list[str](), list[Any]()
    events_of(over + "api/runs/a%20b/live", names, data)
    assert names == ["whole", "end"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("api/runs/nothing", 404),
        ("api/runs/a%20b/prediction", 404),
        ("api/runs/a%20b/frame?time=soon", 400),
        ("api/runs/a%20b/frame?time=nan", 400),
        ("page/..%2fserver.py", 404),
        ("page/%2e%2e/server.py", 404),
    ],
)
def test_bad_requests_get_one_line(over: str, path: str, status: int) -> None:
    found, headers, body = get(over + path)
    assert found == status and len(body.splitlines()) == 1
    assert "content-security-policy" in headers


def test_answers_have_strict_headers_and_are_compressed(over: str) -> None:
    _, headers, _ = get(over + "api/runs/a%20b", accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    for path in ("", "api/runs", "page/app.js"):
        policy = get(over + path)[1]["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert get(over + path)[1]["x-content-type-options"] == "nosniff"


def test_a_page_of_another_name_cannot_read_the_run(over: str) -> None:
    """A foreign page may bind its own name to this machine's address."""
    assert get(over + "api/runs", host="evil.example")[0] == 400
    assert get(over + "api/runs", host=f"localhost:{over.split(':')[2].strip('/')}")[0] == 200
    with served(Known(made_up_reports()), address="127.0.0.2:0") as url:
        assert get(url + "api/runs")[0] == 200


# ---- viewers ----


def test_a_viewer_that_reads_nothing_delays_nobody_and_is_told_all_that_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "SECONDS_BETWEEN_FRAMES", 0.001)
    monkeypatch.setattr(server, "_SECONDS_BETWEEN_LOOKS", 0.001)
    source, reports = Known([]), [*there(), *made_up_reports()]
    source.view.is_live = True

    async def both() -> list[bytes]:
        live = LiveEvents("x", source)
        silent, reading = live.events(source.view), live.events(source.view)
        told = [await anext(silent), await anext(reading)]
        assert told[0] == told[1] and live.viewers == 2
        for report in reports:
            assert source.view.state.apply(report)
            source.view.take(report)
            told.append(await anext(reading))
        return [told[-1], await anext(silent)]

    last, missed = (json.loads(event.split(b"data: ")[1]) for event in asyncio.run(both()))
    history = json.loads(json.dumps(source.view.history("x")))
    assert missed["history"] == {key: history[key] for key in missed["history"]}
    assert missed["history"].keys() >= {"rounds", "marks", "steps", "cost"} and not last["history"]["rounds"]


def test_a_viewer_who_comes_while_a_record_is_read_gets_all_of_it(tmp_path: Path) -> None:
    """The run has ended long ago, but the page does not know yet what became of it."""
    record, names, data = Record(run_folder(tmp_path / "x", recorded(made_up_reports()))), list[str](), list[Any]()
    with served(record) as url:
        viewer = threading.Thread(target=events_of, args=(f"{url}api/runs/a%20b/live", names, data))
        viewer.start()
        wait_until(lambda: len(data) == 1)
        record.start()
        viewer.join(60)
    record.close()
    assert (names[0], names[-1], data[0]["frame"]["rounds_closed"]) == ("whole", "end", 0)
    assert data[-2]["frame"]["rounds_closed"] == 2
    assert {one["round"] for told in data[1:-1] for one in told["history"]["rounds"]} == {1, 2}


def test_viewers_read_all_again_once_an_earlier_sitting_is_known() -> None:
    """The times that they were told were counted from the present sitting."""
    source = Known([])
    source.view.is_live = True
    for report in there():
        report.time += 5000
        source.view.state.apply(report)

    async def viewed() -> list[bytes]:
        channel, found = LiveEvents("x", source).events(source.view), list[bytes]()
        found.append(await anext(channel))
        for report in [*made_up_reports()[:20], begun(START + 5010, 1)]:
            source.view.state.apply(report)
            source.view.take(report)
        found.append(await anext(channel))
        assert f'"span": {source.view.history("x")["span"]}'.encode() in found[-1]
        return found

    assert [one.split(b"\n")[0] for one in asyncio.run(viewed())] == [
        b"event: whole",
        b"event: whole",
    ]


def test_viewers_are_let_go_when_the_page_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Known(made_up_reports())

    def breaks(self: RunView, identifier: str, since: int) -> str:
        raise KeyError("made up")

    async def viewed() -> int:
        return len([event async for event in LiveEvents("x", source).events(source.view)])

    monkeypatch.setattr(RunView, "told", breaks)
    assert asyncio.run(viewed()) == 0
    assert source.view.problems == ["the page cannot show what is new: KeyError: 'made up'"]


def test_a_viewer_that_takes_no_bytes_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SECONDS_TO_SEND", 0.01)

    async def nothing() -> Any:
        yield b"event: frame\n\n"

    async def never(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(EventStream(nothing()).stream_response(never))


# ---- addresses ----


def test_a_port_in_use_and_a_folder_that_is_no_run_are_one_line(tmp_path: Path) -> None:
    run_folder(tmp_path / "x", recorded(made_up_reports()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = CliRunner().invoke(app, ["view", "x", "--runs", str(tmp_path), "--listen", f"127.0.0.1:{port}"])
    assert found.exit_code == 2 and f"127.0.0.1:{port}" in found.output and "in use" in found.output
    for name in ("nothing", "127.0.0.1:9"):
        found = CliRunner().invoke(app, ["view", name, "--runs", str(tmp_path)])
        assert found.exit_code == 2 and "found no run" in found.output, found.output
    with pytest.raises(ConfigError, match=r"--listen 0.0.0.0:0: found an address that others reach"):
        Served({"x": Known([])}, "0.0.0.0:0")


def _client(identity: Identity | None, authority: Identity, folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.authority)
    context.check_hostname = False
    if identity is not None:
        (folder / "own.pem").write_text(f"{identity.key}\n{identity.certificate}")
        context.load_cert_chain(folder / "own.pem")
    return context


def asked(url: str, context: ssl.SSLContext) -> str:
    """Return the name of the run that the page at a URL shows. Raises OSError if it is not shown."""
    with urllib.request.urlopen(url, context=context, timeout=60) as answer:
        return str(json.loads(answer.read())["runs"][0]["name"])


def test_beyond_loopback_only_members_of_the_run_are_served(tmp_path: Path) -> None:
    authority, stranger = Authority("secret"), Authority("another secret")
    own = authority.identity("launcher")
    with served(
        Known(made_up_reports()), address="0.0.0.0:0", authenticators=[Authenticator(own, lambda: None)]
    ) as url:
        address = url.replace("0.0.0.0", "127.0.0.1") + "api/runs"
        assert asked(address, _client(authority.identity("home.1"), own, tmp_path)) == "made-up"
        guest = make_ticket("made-up", "127.0.0.1:1", authority, "0" * 16, time.time() + 600).identity
        for other in (None, stranger.identity("home.1"), guest):
            with pytest.raises(OSError):
                asked(address, _client(other, own, tmp_path))


@pytest.mark.parametrize("serves", [True, False], ids=["served here", "joined"])
def test_a_member_whose_slot_is_taken_back_sees_nothing_more(
    serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a connection that it has open. A host that joined the run asks the exchange."""
    monkeypatch.setattr(server, "_SECONDS_KNOWN", 0.01)
    authority, key, folder = Authority("secret"), new_key(), RunFolder(tmp_path)
    with closing(Memberships(folder.memberships)) as memberships:
        ticket = memberships.invite("home.1", 600)
        number = memberships.enrol(ticket, b"a key", ["home.1"], 600).number
        told = lambda *_, **__: pb.StatusReply(  # noqa: E731
            slots=[pb.SlotStatus(name="home.1", holder=getattr(memberships.held_by("home.1"), "number", 0))]
        )
        monkeypatch.setattr(server, "ask", told)
        own = authority.identity("launcher")
        signed = authority.sign(key.public_key(), "home.1", number, time.time() + 600)
        client = _client(Identity(signed, as_text(key), own.authority), own, tmp_path)
        authenticator = authenticator_of(KnownRun(folder, "127.0.0.1:1", own, serves))
        with served(Known(made_up_reports()), address="0.0.0.0:0", authenticators=[authenticator]) as url:
            host, port = "127.0.0.1", int(url.split(":")[2].strip("/"))
            address = f"https://{host}:{port}/api/runs"
            assert asked(address, client) == "made-up"
            with client.wrap_socket(socket.create_connection((host, port), timeout=60)) as kept:
                memberships.revoke("home.1")
                with suppress(ConnectionError, ssl.SSLError):
                    assert kept.recv(1) == b""
            with pytest.raises(OSError):
                asked(address, client)
            other = authority.sign(key.public_key(), "home.1", number + 1, time.time() + 600)
            with pytest.raises(OSError):
                asked(address, _client(Identity(other, as_text(key), own.authority), own, tmp_path))


# ---- the exported file ----


def test_hostile_texts_stay_data_in_the_exported_file() -> None:
    told = membership_event(START + 1, pb.GIVEN_UP, slot="home.1", cause=HOSTILE)
    html = self_contained(data_of({HOSTILE: Known([*there(), told])}))
    assert "alert(1)</script>" not in html
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*)</script>', html)[0])
    assert data["histories"][HOSTILE]["marks"][-1]["text"] == HOSTILE
    assert data["frames"][HOSTILE][-1]["members"]["home.1"]["detail"] == HOSTILE


def test_commands_open_a_page_or_write_it_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Served, "run", lambda self: opened.append(self.url))
    runs = ["--runs", str(tmp_path)]
    for name in ("x", "y"):
        run_folder(tmp_path / name, recorded(made_up_reports()))
    for words in (["view", "x", "y", *runs], ["simulate", str(MIXED), "--view", *runs]):
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0 and opened[-1] in found.output, found.output
    found = CliRunner().invoke(app, ["view", "x", *runs, "--export", str(tmp_path / "x.html")])
    assert found.exit_code == 0 and len(opened) == 2, found.output
    assert '"rounds_closed":2' in (tmp_path / "x.html").read_text()


# ---- runs elsewhere, and predictions ----


@contextmanager
def started(source: Source) -> Iterator[dict[str, Any]]:
    """Yield a prediction once the record beside it has been read."""
    source.start()
    assert source.wait(60)
    yield source.prediction() or {}
    source.close()


class _Exchange:
    """The exchange of a run elsewhere, as a watcher sees it: it disconnects once, then says nonsense."""

    connections = 0

    def __init__(self, address: str, credentials: object) -> None: ...

    def watch(self, so_far: bool) -> Iterator[Report]:
        _Exchange.connections += 1
        if _Exchange.connections == 1:
            yield from made_up_reports()[:10]
            raise LinkClosed("the exchange does not answer")
        if _Exchange.connections == 2:
            raise KeyError("made up")
        yield from made_up_reports()

    def close(self) -> None: ...


MEMBERSHIP: Any = type("M", (), {"address": "a:1", "credentials": None, "slot": "home.1"})


def test_a_run_elsewhere_is_followed_over_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ExchangeClient", _Exchange)
    monkeypatch.setattr(sources, "_SECONDS_BETWEEN_TRIES", 0.0)
    monkeypatch.setattr(_Exchange, "connections", 0)
    source = Watched(view_of([]).state.spec, MEMBERSHIP, RunFolder(tmp_path))
    source.start()
    source._thread.join(60)
    assert (source.view.outcome, source.view.is_live) == ("over", False)
    assert summary_of(source.view.state) == summary_of(view_of(made_up_reports()).state)
    assert source.view.history("x")["own"] == ["home.1"]
    source.close()


def test_a_predicted_step_fills_the_time_of_each_member_beside_measured_numbers(tmp_path: Path) -> None:
    file = ConfigFile(MIXED)
    alike = ConfigFile(MIXED, ["replicas.1.count=3"])
    members = [one["id"] for one in (Source(None, PredictedStep(spec_of(alike))).prediction() or {})["members"]]
    assert members == ["dc", "home-1.0", "home-1.1", "home-1.2"]  # one group for all that are alike
    step = PredictedStep(spec_of(file))
    found = Source(None, step).prediction() or {}
    assert [one["id"] for one in found["members"]] == ["dc", "home.0", "home.1", "home.2"]
    for member in found["members"]:
        bars = member["bars"]
        assert bars[0]["start"] == 0 and all(a["end"] <= b["start"] + 1e-9 for a, b in itertools.pairwise(bars))
    steps = [bar for bar in found["members"][1]["bars"] if bar["kind"] == "forward"]
    assert [bar["micro_batch"] for bar in steps] == [0, 1]
    assert {bar["kind"] for link in found["links"] for bar in link["bars"]} == {"there", "back"}
    assert {one["measured"] for one in found["values"]} == {None} and found["measured"] == []
    times = pb.MemberRound(round=1, compute_seconds=3.0, wait_seconds=1.0)
    reports = [*made_up_reports(), Report(time=START + 9, member="home.1", member_round=times)]
    with started(Record(run_folder(tmp_path / "x", recorded(reports)), step)) as beside:
        assert {one["name"]: one["measured"] for one in beside["values"]}["round"] == 9.0
        [member] = beside["measured"]
        bars = [(bar["kind"], bar["start"], bar["end"]) for bar in member["bars"]]
        assert (member["id"], bars) == ("home.1", [("computed", 0.0, 1.5), ("waited", 1.5, 2.0)])  # two steps a round


# ---- launch --view ----


def test_a_launched_run_is_shown_until_its_end(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, data, viewers = list[str](), list[Any](), list[threading.Thread]()

    class Watched(Served):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            live = f"{self.url}api/runs/mixed/live"
            viewers.append(threading.Thread(target=events_of, args=(live, names, data)))

        @contextmanager
        def in_background(self) -> Iterator[None]:
            with super().in_background():
                viewers[0].start()
                yield

    monkeypatch.setattr(server, "Served", Watched)
    settings = ["--set", f"data.corpus={corpus}", "--set", "outer.rounds=2", "--runs", str(tmp_path)]
    found = CliRunner().invoke(app, ["launch", str(MIXED), "--in-process", "--view", *settings])
    assert found.exit_code == 0 and "the run is shown at http://127.0.0.1:" in found.output, found.output
    viewers[0].join(60)
    folder = RunFolder(tmp_path / "mixed")
    told = json.loads(folder.summary.read_text())
    changes, frames = [one["history"] for one in data[:-1]], [one["frame"] for one in data[:-1]]
    assert names[-1] == "end" and (frames[-1]["phase"], frames[-1]["rounds_closed"]) == ("over", 2)
    assert {one["round"] for change in changes for one in change.get("rounds", [])} == {1, 2}
    assert {one["kind"] for change in changes for one in change.get("marks", [])} >= {"joined"}
    record = Record(folder)
    record.start()
    assert record.wait(60)
    _require_equal(record.view, told)
    assert json.loads(record.view.frame())["replicas"] == frames[-1]["replicas"]
    record.close()


def _require_equal(view: RunView, told: dict[str, Any]) -> None:
    """Require that the history and the last frame of a finished run are its summary."""
    history, last = view.history("mixed"), json.loads(view.frame())
    assert (history["outcome"], history["is_live"], history["problems"]) == ("over", False, [])
    assert told == json.loads(json.dumps(summary_of(view.state)))
    assert [one["validation_loss"] for one in history["rounds"]] == told["validation_loss"]
    assert [one["bytes"] for one in history["rounds"]] == [one["bytes"] for one in told["contributions"]["per_round"]]
    assert (last["phase"], last["rounds_closed"]) == ("over", told["rounds"])
    assert [last["replicas"][one["name"]]["tokens"] for one in told["replicas"]] == [
        one["tokens"] for one in told["replicas"]
    ]
    for link in told["links"]:
        sides = (last["links"][link["name"]][side]["bytes"] for side in ("there", "back"))
        assert tuple(sides) == (link["wire_bytes"]["forward"], link["wire_bytes"]["backward"])
    assert history["cost"]["tokens_per_second"] == told["tokens_per_second"]
    assert all(cell["compute_seconds"] > 0 for one in history["rounds"] for cell in one["cells"].values())


def test_an_error_of_the_page_does_not_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RunView, report: Report) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RunView, "take", broken)
    state, said = RunState(view_of([]).state.spec), list[str]()
    with pytest.raises(RunFailed, match="a cause"), on_a_page(state, said.append) as show:
        show(inner_step(START, "dc", "dc", 1, 0, loss=1.0))
        history = json.loads(get(said[0].split()[-1] + "api/runs/made-up")[2])["history"]
        assert "the page stopped following the run: ZeroDivisionError" in history["problems"][0]
        raise RunFailed("a cause")
