"""Measurements of the lines of hosts that wait or look before they join: which are taken, how often, and cheats."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
from members import TIMEOUT
from open_house import Served

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import Refused
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc import admission_client
from hetero_pp.rpc.admission_client import _FRAME_BYTES, _FRAMES, BUSY, ask, be_probed, measure
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.services import ADMISSION_SERVICE, call_path
from replica_groups.exchange import admission


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def test_a_line_is_measured_by_who_is_dialled_though_others_say_nothing(served: Served) -> None:
    over, lines, ticket = threading.Event(), _lines(served), served.ticket()
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        _silent = [_probe(channel, _until(over)) for _ in range(2)]
        assert be_probed(served.address, ticket.identity) == ""
        over.set()
    ((found, up, down),) = lines
    assert found == ticket.id
    assert min(up, down) > 1e6 and max(up, down) < 1e12


@pytest.mark.parametrize("said", [0, 1, _FRAMES - 1, _FRAMES])
def test_a_probe_without_end_is_over_after_a_while(served: Served, monkeypatch: pytest.MonkeyPatch, said: int) -> None:
    monkeypatch.setattr(admission, "PROBE_SECONDS", 0.3)
    over, frames = threading.Event(), [bytes(_FRAME_BYTES)] * said
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        with pytest.raises(grpc.RpcError) as error:
            for _ in _probe(channel, _until(over, frames)):
                pass
        assert isinstance(error.value, grpc.Call)
        assert error.value.code() is grpc.StatusCode.CANCELLED
        served.wait_until(lambda: not served.waiting_room._probing)
        over.set()


HALF = [bytes(_FRAME_BYTES)] * (_FRAMES // 2)


@pytest.mark.parametrize(
    "frames", [[], [b"a"], [*HALF, b""], HALF, [*HALF, *HALF, bytes(16)], [*HALF, *HALF, bytes(17)]],
    ids=["nothing", "small", "empty", "half", "before it has got anything", "a longer word"],
)  # fmt: skip
def test_who_cheats_is_refused_and_not_measured(served: Served, frames: list[bytes]) -> None:
    lines = _lines(served)
    channel = make_channel(served.address, served.ticket().identity, EXCHANGE)
    with closing(channel), pytest.raises(grpc.RpcError) as error:
        list(_probe(channel, iter(frames)))
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (lines, served.refusals()) == ([], {Kind.MALFORMED: 1})


def _lines(served: Served) -> list[tuple[str, float, float]]:
    """Return a list that receives every line that the waiting room is told about from now on."""
    told = list[tuple[str, float, float]]()
    served.waiting_room.probed = lambda *line: told.append(line)  # type: ignore[method-assign]
    return told


def _probe(
    channel: grpc.Channel, frames: Iterator[bytes], compression: grpc.Compression | None = None
) -> Iterator[bytes]:
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(ADMISSION_SERVICE, "Probe"))
    return iter(call(frames, wait_for_ready=True, timeout=TIMEOUT, compression=compression))


def _until(over: threading.Event, frames: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Yield these frames, then send nothing until `over` is set."""
    yield from frames
    over.wait(TIMEOUT)


def test_a_preview_takes_no_slot(served: Served) -> None:
    ticket = served.ticket("b")
    found = ask(served.address, ticket.identity, "Preview", seconds=TIMEOUT)
    assert (found.version, found.slots, found.refusal) == (PROTOCOL_VERSION, ["b"], "")
    assert abs(found.clock - time.time()) < TIMEOUT
    assert ask(served.address, served.ticket().identity, "Preview", seconds=TIMEOUT).slots == ["a", "b"]
    assert [one.is_used for one in served.memberships.tickets()] == [False, False, False]
    other = served.ticket("b")
    member = served.takes(ticket)
    assert ask(served.address, member.identity, "Preview", seconds=TIMEOUT).slots == ["b"]
    for refused, said in ((ticket, "the ticket was used already"), (other, "b is taken by another host")):
        found = ask(served.address, refused.identity, "Preview", seconds=TIMEOUT)
        assert (found.slots, found.refusal.startswith(said), found.neighbours) == ([], True, {})


def test_a_host_looks_and_measures_a_bounded_number_of_times(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PREVIEWS_AT_ONCE", 2)
    monkeypatch.setattr(admission, "ALL_MEASUREMENTS_AT_ONCE", 4)
    served.serve_again()
    ticket = served.ticket()
    for _ in range(2):
        ask(served.address, ticket.identity, "Preview", seconds=TIMEOUT)
        measure(served.address, served.ticket().identity)
    with pytest.raises(Refused, match=r"asked too often; it may again in \d+ s"):
        ask(served.address, ticket.identity, "Preview", seconds=TIMEOUT)
    with pytest.raises(Refused, match=r"many hosts have measured their lines; this one can be measured in \d+ s"):
        measure(served.address, served.ticket().identity)


def test_a_line_is_measured_by_its_host_for_a_bounded_time_and_not_too_often(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = served.ticket()
    for rate in measure(served.address, ticket.identity):
        assert rate.bits_per_second > 1e6
    monkeypatch.setattr(admission_client, "MEASURE_BYTES", 1 << 30)
    monkeypatch.setattr(admission_client, "_OWN_SECONDS", 0.1)
    up, down = measure(served.address, ticket.identity)
    assert up.is_limited
    assert down.is_limited
    with pytest.raises(Refused, match=r"measured a moment ago; it can be measured again in \d+ s"):
        measure(served.address, ticket.identity)
    assert (served.waiting_room.here, served.refusals()) == (0, {})


def test_a_measurement_has_few_bytes_and_no_other_beside_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(make_channel(served.address, served.ticket().identity, EXCHANGE)) as channel:
        path = call_path(ADMISSION_SERVICE, "Measure")
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([bytes(1 << 20)] * 5), wait_for_ready=True, timeout=TIMEOUT))
        assert "in a measurement" in str(error.value)
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([b""] * 5000), wait_for_ready=True, timeout=TIMEOUT))
        assert "in a measurement" in str(error.value)
        monkeypatch.setattr(admission, "MEASURE_SECONDS", TIMEOUT)
        over, frames = threading.Event(), [bytes(1)]
        first = call(_until(over, frames), wait_for_ready=True, timeout=TIMEOUT)
        assert next(first) == b""
        monkeypatch.setattr(admission, "MEASURE_SECONDS", 0.1)
        with pytest.raises(Refused, match=BUSY):
            measure(served.address, served.ticket().identity)
        over.set()
        assert list(first) == []
