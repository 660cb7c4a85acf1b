"""Routes: which of two neighbouring stages dials the other, and whether the exchange can reach a member."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hetero_pp.config.lines import EXCHANGE, RELAYED
from hetero_pp.rpc import channels
from hetero_pp.rpc.channels import Reach, make_server
from hetero_pp.rpc.identities import Secret
from replica_groups.exchange.exchange import Listens, is_before_dialled

SECRET = Secret("the run's secret")
HERE, THERE, NOWHERE = Listens("here:1"), Listens("there:2"), Listens(RELAYED)


def _known(listens: Listens, is_reached: bool) -> Listens:
    return listens._replace(is_reached=is_reached)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Listens(), THERE, False),
        (Listens(), NOWHERE, False),
        (Listens(), Listens(), False),
        (NOWHERE, NOWHERE, False),
        (HERE, NOWHERE, True),
        (HERE, THERE, False),
        (_known(HERE, True), THERE, True),
        (HERE, _known(THERE, False), True),
        (_known(HERE, True), _known(THERE, True), False),
        (_known(HERE, False), _known(THERE, False), False),
        (NOWHERE, _known(THERE, False), False),
        (_known(HERE, False), NOWHERE, True),
        (_known(HERE, False), Listens("127.0.0.1:2", True), True),
        (NOWHERE, Listens("127.0.0.1:2", True), False),
        (Listens("127.0.0.1:1", True), Listens("127.0.0.1:2"), False),
    ],
)
def test_who_is_likelier_to_be_reached_is_dialled(before: Listens, after: Listens, expected: bool) -> None:
    assert is_before_dialled(before, after) is expected


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Reach:
    monkeypatch.setattr(channels, "DIAL_SECONDS", 0.5)
    return Reach(SECRET.authority.identity(EXCHANGE))


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address at which home.1 listens."""
    with ExitStack() as stack:
        server, port = make_server("127.0.0.1:0", [], 2, SECRET.authority.identity("home.1"))
        stack.callback(lambda: server.stop(None).wait())
        yield f"127.0.0.1:{port}"


def test_a_member_is_dialled_where_it_is_and_says_that_it_listens(
    reach: Reach, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "DIAL_SECONDS", 60.0)  # it answers
    port = address.rpartition(":")[2]
    assert reach.of("home.1", address, "ipv4:127.0.0.1:7", is_new=True) is True
    assert reach.of("home.1", f"localhost:{port}", "ipv4:127.0.0.1:7", is_new=True) is True
    assert reach.of("home.1", address, "ipv6:%5B::ffff:127.0.0.1%5D:7", is_new=True) is True


def test_only_who_shows_to_be_the_member_is_reached(reach: Reach, address: str) -> None:
    assert reach.of("home.0", address, "ipv4:127.0.0.1:7", is_new=True) is False
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = f"127.0.0.1:{silent.getsockname()[1]}"
        assert reach.of("home.1", found, "ipv4:127.0.0.1:7", is_new=True) is False
    assert reach.of("home.1", found, "ipv4:127.0.0.1:7", is_new=True) is False


def test_nothing_else_is_dialled(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a member could use the exchange to probe the exchange's network."""
    reach = _that_never_dials(monkeypatch)
    for elsewhere in ("ipv4:127.0.0.2:7", "ipv6:%5B2001:db8::1%5D:7", "unix:", "", "ipv4:", "ipv4:a:b"):
        assert reach.of("home.1", address, elsewhere, is_new=True) is None
    for told in ("", RELAYED, "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999999999", "a\x00:1", ":1"):
        assert reach.of("home.1", told, "ipv4:127.0.0.9:7", is_new=True) is None


def test_a_member_is_dialled_once_for_all_rounds(reach: Reach, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reach.of("home.0", address, "ipv4:127.0.0.1:7", is_new=True) is False
    monkeypatch.setattr(channels, "is_reached", lambda *_: True)
    assert reach.of("home.0", address, "ipv4:127.0.0.1:7", is_new=False) is False
    assert reach.of("home.0", f"localhost:{address.rpartition(':')[2]}", "ipv4:127.0.0.1:7", is_new=False) is True
    assert reach.of("home.0", address, "ipv4:127.0.0.1:7", is_new=True) is True


def _that_never_dials(monkeypatch: pytest.MonkeyPatch) -> Reach:
    def dial(*_: object) -> bool:
        raise AssertionError("it was dialled")

    monkeypatch.setattr(channels, "is_reached", dial)
    return Reach(SECRET.authority.identity(EXCHANGE))
