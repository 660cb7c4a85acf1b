"""Encrypted runs: a caller shows a certificate of the run's authority, and has the name in that certificate."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from members import TIMEOUT
from opened_links import open_stage_link
from small_run import Run

from hetero_pp.config.lines import EXCHANGE, LinkShape, LinkSpec
from hetero_pp.core.errors import LinkTimeout, NewRun, PeerAtFault, Refused, WrongToken
from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import LastRoundReply, LastRoundRequest, LinkHeader
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc import channels
from hetero_pp.rpc.channels import make_channel, make_server
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import (
    Authority,
    Credentials,
    Identity,
    Secret,
    as_text,
    new_key,
    read_certificate,
)
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import StageLink
from replica_groups.exchange.server import serve_exchange

SECRET, OTHER = Secret("the run's secret"), Secret("another run's secret")
LINK = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
HOUR = 3600.0


class Served:
    """A run of members `a` and `b` behind a TLS server. Both train its first round."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run = Run(folder, {"a": 1, "b": 1}, quorum=1.0)
        self.run.assign(0, "a", "b")
        server, self.port = serve_exchange(self.run.exchange, SECRET, "127.0.0.1:0", encrypted=True)
        self.address, self._stack = f"127.0.0.1:{self.port}", stack
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))

    def client(self, credentials: Credentials) -> ExchangeClient:
        client = ExchangeClient(self.address, credentials, "run", timeout=TIMEOUT)
        self._stack.callback(client.close)
        return client

    def refused(self) -> int:
        return self.run.exchange.runner.refusals.counts.total()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def served(tmp_path: Path, stack: ExitStack) -> Served:
    return Served(tmp_path, stack)


def _signed(by: Authority, name: str = "a", until: float = HOUR) -> Identity:
    key = new_key()
    return Identity(by.sign(key.public_key(), name, 0, time.time() + until), as_text(key), SECRET.authority.certificate)


def _self_signed() -> Identity:
    """Return an identity of another authority with the same name as the run's authority."""
    return _signed(Authority("made up"))


def _expired() -> Identity:
    return _signed(SECRET.authority, until=-1.0)


def _early() -> Identity:
    """Return an identity that becomes valid in a day, as a new one seems to a host whose clock is a day late."""
    with mock.patch("hetero_pp.rpc.identities.CLOCKS_DIFFER", -24 * HOUR):
        return _signed(SECRET.authority, until=48 * HOUR)


def _signed_by_a_member() -> Identity:
    """Return an identity that is signed by a member's certificate, which belongs to no authority."""
    own, key, forger = _signed(SECRET.authority), new_key(), Authority("made up")
    forger._key = load_pem_private_key(own.key.encode(), None)  # type: ignore[assignment]
    certificate = forger.sign(key.public_key(), "b", 0, time.time() + HOUR) + own.certificate
    return Identity(certificate, as_text(key), own.authority)


def test_a_certificate_says_what_was_signed() -> None:
    identity = _signed(SECRET.authority, "home.2", HOUR)
    found = read_certificate(identity.certificate.encode())
    assert (found.name, found.holder) == ("home.2", 0)
    assert found.until == pytest.approx(time.time() + HOUR, abs=60)
    assert found.since < time.time() - HOUR / 2
    assert SECRET.credentials("dc", encrypted=True).identity is not None
    assert SECRET.authority.identity("dc").shown.holder == 0


def test_credentials_cross_as_json() -> None:
    for encrypted in (True, False):
        credentials = SECRET.credentials("home.0", [LINK], encrypted)
        assert Credentials.from_json(credentials.to_json()) == credentials
        assert SECRET.text not in credentials.to_json()


def test_who_calls_is_who_its_certificate_names(served: Served) -> None:
    """Names and tokens in the metadata are ignored."""
    client = served.client(replace(SECRET.credentials("a", encrypted=True), name="b", token="made up"))
    assert client.agree("b", "{}") == "run"
    with pytest.raises(Refused, match="a did not start b"):
        client.died("b", "nothing")
    client.died("a", "this one may say it")


def test_authorities_of_one_secret_trust_each_other() -> None:
    one, other = Authority("secret"), Authority("secret")
    assert one.certificate != other.certificate
    with _server(one.identity("exchange")) as address:
        assert _reaches(address, other.identity("a"))
        assert not _reaches(address, Authority("secret.").identity("a"))


@pytest.mark.parametrize("identity", [_self_signed, _expired, _early, _signed_by_a_member])
def test_who_has_no_certificate_of_the_run_reaches_nothing(served: Served, identity: Callable[[], Identity]) -> None:
    assert not _reaches(served.address, identity())
    assert _reaches(served.address, _signed(SECRET.authority))
    assert served.refused() == 0  # no call reached a handler


def test_who_shows_no_certificate_reaches_nothing(served: Served) -> None:
    credentials = grpc.ssl_channel_credentials(SECRET.authority.certificate.encode())
    options = [("grpc.ssl_target_name_override", EXCHANGE), ("grpc.enable_http_proxy", 0)]
    with grpc.secure_channel(served.address, credentials, options) as channel:
        assert not _answers(channel)
    with make_channel(served.address) as channel:
        assert not _answers(channel)
    assert served.refused() == 0


def test_a_process_is_spoken_to_by_its_name_alone() -> None:
    """Another member that listens at the exchange's former address is not accepted as the exchange."""
    with _server(SECRET.authority.identity("home.1")) as address:
        assert not _reaches(address, SECRET.authority.identity("a"))
        assert _reaches(address, SECRET.authority.identity("a"), "home.1")


def test_an_older_tls_is_no_tls(served: Served, tmp_path: Path) -> None:
    """gRPC cannot refuse the handshake of older versions, so the calls are refused."""
    identity = _signed(SECRET.authority)
    (tmp_path / "a.pem").write_text(identity.certificate + identity.key)
    context = ssl.create_default_context(cadata=identity.authority)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tmp_path / "a.pem")
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", served.port)) as plain, context.wrap_socket(plain) as old:
        assert old.version() == "TLSv1.2"
        old.settimeout(TIMEOUT)
        old.sendall(_request(call_path(SERVICE, "LastRound")))
        answer = b""
        while b"another token" not in answer:
            answer += old.recv(4096)
    assert served.refused() == 1


def _request(path: str) -> bytes:
    """Return the beginning of a call over HTTP/2 (RFC 9113), with headers neither indexed nor compressed."""
    headers = {":method": "POST", ":scheme": "https", ":path": path, ":authority": EXCHANGE}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    block = b"".join(
        b"\x00" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode()
        for key, value in headers.items()
    )
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)
    return preface + len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block


def test_who_connects_and_says_nothing_goes_by_itself(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("grpc.server_handshake_timeout_ms", 10_000) in channels._SERVER_OPTIONS
    options = [("grpc.server_handshake_timeout_ms", 500), *channels._SERVER_OPTIONS[:1]]
    monkeypatch.setattr(channels, "_SERVER_OPTIONS", options)
    with _server(SECRET.authority.identity(EXCHANGE)) as address, ExitStack() as silent:
        host, port = address.split(":")
        strangers = [silent.enter_context(socket.create_connection((host, int(port)))) for _ in range(50)]
        assert _reaches(address, SECRET.authority.identity("a"))
        for stranger in strangers:
            stranger.settimeout(TIMEOUT)
            assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    ("mine", "error", "told"),
    [
        (OTHER.credentials("a", encrypted=True), WrongToken, "was started with another token"),
        (
            SECRET.credentials("a"),
            Refused,
            "uses TLS, but this host does not: `exchange.insecure` has to be",
        ),
        (Credentials("a", identity=_expired()), Refused, "the certificate of this host expired at"),
        (Credentials("a", identity=_early()), Refused, "is valid from .*: check the clock of this host"),
    ],
)
def test_who_cannot_connect_is_told_why(mine: Credentials, error: type[Exception], told: str, served: Served) -> None:
    with pytest.raises(error, match=told):
        served.client(mine).agree("a", "{}")


def _let_in_by_a_ticket() -> Credentials:
    key = new_key()
    certificate = SECRET.authority.sign(key.public_key(), "a", 1, time.time() + HOUR)
    return Credentials("a", identity=Identity(certificate, as_text(key), SECRET.authority.certificate))


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        (SECRET.credentials("a", encrypted=True), "token belongs to the previous run; copy the new token to this host"),
        (_let_in_by_a_ticket(), "certificate belongs to the previous run; ask for a new ticket"),
    ],
)
def test_a_new_run_at_its_address_is_told_to_a_member_and_does_not_end_it(
    mine: Credentials, yours: str, comes_back: bool, tmp_path: Path, stack: ExitStack
) -> None:
    """The new run may be an impostor. The member waits for its own run as long as for a lost exchange."""
    run, told = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0), list[str]()
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0", encrypted=True)
    address = f"127.0.0.1:{port}"
    client = stack.enter_context(closing(ExchangeClient(address, mine, "run")))
    client.wait_until_ready(TIMEOUT)
    lost = threading.Event()
    ready = grpc.ChannelConnectivity.READY
    client._wires.control.subscribe(lambda state: None if state is ready else lost.set())
    server.stop(None).wait(TIMEOUT)
    assert lost.wait(TIMEOUT)
    server, _ = serve_exchange(run.exchange, OTHER, address, encrypted=True)

    def on_refused(cause: str) -> None:
        nonlocal server
        told.append(cause)
        if comes_back:
            server.stop(None).wait(TIMEOUT)
            server, _ = serve_exchange(run.exchange, SECRET, address, encrypted=True)

    found = f"a new run has started at {address}; your {yours}"
    if comes_back:
        client.wait_until_ready(TIMEOUT, on_refused=on_refused)
    else:
        with pytest.raises(NewRun, match=found):
            client.wait_until_ready(2.0, on_refused=on_refused)
    assert told == [found]
    server.stop(None).wait(TIMEOUT)


def test_another_program_at_the_exchanges_address_is_no_new_run() -> None:
    with _server(OTHER.authority.identity("dc")) as address:
        client = ExchangeClient(address, SECRET.credentials("a", encrypted=True), "run", timeout=TIMEOUT)
        with closing(client), pytest.raises(Refused, match="another program answers at this address"):
            client.agree("a", "{}")


def test_who_encrypts_is_told_that_the_exchange_does_not(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    stack.callback(lambda: server.stop(None).wait(TIMEOUT))
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a", encrypted=True), "run", timeout=TIMEOUT)
    with closing(client), pytest.raises(Refused, match="does not use TLS, but this host does"):
        client.agree("a", "{}")


class Listener:
    """Stage 1 of a group, which stage 0 dials."""

    def __init__(self, stack: ExitStack) -> None:
        self.refusals: list[Kind] = []
        self.links = StageLink(
            LinkSide(
                LINK,
                _link_credentials("home.1"),
                "home.1",
                0,
                on_refusal=lambda sender, reason, kind: self.refusals.append(kind),
            ),
            expected=None,
        )
        self.address = f"127.0.0.1:{self.links.listen('127.0.0.1:0')}"
        stack.callback(self.links.close, grace=0)


def _link_credentials(name: str, secret: Secret = SECRET) -> Credentials:
    return secret.credentials(name, [LINK], encrypted=True).of_link(LINK.name)


def test_a_stage_link_is_for_its_two_ends(stack: ExitStack) -> None:
    listener = Listener(stack)
    with pytest.raises(Refused, match="another token"):
        open_stage_link(listener.address, LINK, _link_credentials("home.2"), "home.0", 0, TIMEOUT)
    assert listener.refusals == [Kind.STRANGER]
    for stranger in (_link_credentials("home.0", OTHER), Credentials("", "a token")):
        with pytest.raises(LinkTimeout):
            open_stage_link(listener.address, LINK, stranger, "home.0", 0, 0.3)
    above = open_stage_link(listener.address, LINK, _link_credentials("home.0"), "home.0", 0, TIMEOUT)
    below = listener.links.accept(TIMEOUT)
    above.send(Message(LinkHeader(step=3)))
    assert below.receive(TIMEOUT).header.step == 3
    above.close()


def _holder(name: str, holder: int) -> Credentials:
    """Return the link credentials of a member with a ticket."""
    key = new_key()
    certificate = SECRET.authority.sign(key.public_key(), name, holder, time.time() + 3600.0)
    return Credentials("", identity=Identity(certificate, as_text(key), SECRET.authority.certificate))


def _dial(listener: Listener, credentials: Credentials, generation: int, timeout: float = TIMEOUT) -> GrpcLinkEnd:
    return open_stage_link(listener.address, LINK, credentials, "home.0", 0, timeout, generation=generation)


def test_a_former_holder_gets_no_link_and_keeps_nobody_out(stack: ExitStack) -> None:
    """Its certificate is valid for hours, but it is refused in its own generation, the next and the highest."""
    listener = Listener(stack)
    listener.links.expect(5, 2)
    for generation in (4, 5, 6, 2**32 - 1):
        with pytest.raises(Refused, match=r"found holder 1 of home\.0, expected 2"):
            _dial(listener, _holder("home.0", 1), generation)
    assert listener.refusals == [Kind.FORBIDDEN] * 4
    above = _dial(listener, _holder("home.0", 2), 5)
    above.send(Message(LinkHeader(step=3)))
    assert listener.links.accept(TIMEOUT, 5).receive(TIMEOUT).header.step == 3
    above.abort("the test is over")


def test_a_generation_is_good_once_the_exchange_has_told_of_it(stack: ExitStack) -> None:
    """A neighbour that already knows a later generation has to wait. Its claims about it end no link."""
    listener = Listener(stack)
    listener.links.expect(5, 1)
    above = _dial(listener, _holder("home.0", 1), 5)
    below = listener.links.accept(TIMEOUT, 5)
    for generation in (6, 2**32 - 1):
        with pytest.raises(LinkTimeout):
            _dial(listener, _holder("home.0", 1), generation, timeout=0.3)
    above.send(Message(LinkHeader(step=3)))
    assert below.receive(TIMEOUT).header.step == 3
    assert listener.refusals == []
    with ThreadPoolExecutor() as threads:
        newer = threads.submit(_dial, listener, _holder("home.0", 2), 6)
        listener.links.expect(6, 2)
        newer.result(TIMEOUT).send(Message(LinkHeader(step=7)))
        assert listener.links.accept(TIMEOUT, 6).receive(TIMEOUT).header.step == 7
    assert set(listener.refusals) <= {Kind.FORBIDDEN}, "a dial of holder 1 that was given up may arrive only now"
    newer.result().abort("the test is over")


def test_another_holder_of_the_same_generation_is_refused(stack: ExitStack) -> None:
    listener = Listener(stack)
    listener.links.expect(5, 1)
    for other in (_holder("home.0", 2), _holder("home.0", 0)):
        with pytest.raises(Refused, match=r"found holder \d of home\.0, expected 1"):
            _dial(listener, other, 5)


def test_a_wrong_hello_fails_the_awaited_link_and_names_its_sender(stack: ExitStack) -> None:
    """A link that is already connected stays open."""
    listener = Listener(stack)
    wrong, own = replace(LINK, name="home.1-2"), _holder("home.0", 1)
    for generation, is_connected in ((5, True), (6, False)):
        listener.links.expect(generation, 1)
        if is_connected:
            above = _dial(listener, own, generation)
        with pytest.raises(Refused, match=r"found link home\.1-2"):
            open_stage_link(listener.address, wrong, own, "home.0", 0, TIMEOUT, generation=generation)
        below = listener.links.accept(TIMEOUT, generation)
        if is_connected:
            above.send(Message(LinkHeader(step=3)))
            assert below.receive(TIMEOUT).header.step == 3
            continue
        with pytest.raises(PeerAtFault, match=r"malformed data from home\.0: found link home\.1-2") as error:
            below.receive(TIMEOUT)
        assert error.value.peer == "home.0"
    assert listener.refusals == [Kind.UNEXPECTED, Kind.MALFORMED]
    above.abort("the test is over")


def test_a_stage_dials_its_neighbour_alone(stack: ExitStack) -> None:
    """It does not accept another member of the run at the neighbour's former address."""
    own = _link_credentials("home.2")
    links = StageLink(LinkSide(LINK, own, "home.1", 0), expected=None)
    address = f"127.0.0.1:{links.listen('127.0.0.1:0')}"
    stack.callback(links.close, grace=0)
    with pytest.raises(LinkTimeout):
        open_stage_link(address, LINK, _link_credentials("home.0"), "home.0", 0, 0.3)


@pytest.mark.parametrize("encrypted", [True, False])
def test_both_neighbours_dial_a_stage_at_one_address(encrypted: bool, stack: ExitStack) -> None:
    """Each is accepted only as itself. Other callers are refused and counted."""
    below = replace(LINK, name="home.1-2", source="home.1", target="home.2")

    def own(name: str) -> tuple[Credentials, Credentials]:
        found = SECRET.credentials(name, [LINK, below], encrypted)
        return found.of_link(LINK.name), found.of_link(below.name)

    refused: list[Kind] = []
    before = StageLink(
        LinkSide(LINK, own("home.1")[0], "home.1", 0, on_refusal=lambda *refusal: refused.append(refusal[2])),
        expected=None,
    )
    after = StageLink(LinkSide(below, own("home.1")[1], "home.1", 0), expected=None)
    address = f"127.0.0.1:{before.listen('127.0.0.1:0', after)}"
    stack.callback(before.close, grace=0)
    last = StageLink(LinkSide(below, own("home.2")[1], "home.2", 0)).dial(address, 0, TIMEOUT)
    first = open_stage_link(address, LINK, own("home.0")[0], "home.0", 0, TIMEOUT)
    for sender, receiver in ((first, before.accept(TIMEOUT)), (last, after.accept(TIMEOUT))):
        for one, other in ((sender, receiver), (receiver, sender)):
            one.send(Message(LinkHeader(step=3)))
            assert other.receive(TIMEOUT).header.step == 3
    stranger = SECRET.credentials("dc", encrypted=True).of_link("") if encrypted else Credentials("", "another")
    with pytest.raises(Refused, match="another token"):
        open_stage_link(address, LINK, stranger, "home.0", 0, TIMEOUT)
    with pytest.raises(Refused, match=r"found link home\.0-1, expected home\.1-2|another token"):
        open_stage_link(address, LINK, own("home.2")[1], "home.0", 0, TIMEOUT)
    assert Kind.STRANGER in refused
    first.close()
    last.close()


class _server:
    """A server with one identity that answers LastRound."""

    def __init__(self, identity: Identity) -> None:
        handler: grpc.RpcMethodHandler[bytes, LastRoundReply] = grpc.unary_unary_rpc_method_handler(
            lambda request, context: LastRoundReply(), None, LastRoundReply.SerializeToString
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE.full_name, {"LastRound": handler})
        self._server, port = make_server("127.0.0.1:0", [handlers], 4, identity)
        self._address = f"127.0.0.1:{port}"

    def __enter__(self) -> str:
        return self._address

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(TIMEOUT)


def _reaches(address: str, identity: Identity, peer: str = EXCHANGE) -> bool:
    with make_channel(address, identity, peer) as channel:
        return _answers(channel)


def _answers(channel: grpc.Channel) -> bool:
    """Return whether a call reaches a handler, which answers or refuses it."""
    ask: grpc.UnaryUnaryMultiCallable[LastRoundRequest, bytes] = channel.unary_unary(
        call_path(SERVICE, "LastRound"), LastRoundRequest.SerializeToString
    )
    try:
        ask(LastRoundRequest(), timeout=TIMEOUT)
    except grpc.RpcError as error:
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
