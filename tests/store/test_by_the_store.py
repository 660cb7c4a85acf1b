"""Contributions and run checkpoints that go through the store by HTTP: the exchange carries none of their bytes."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal
from urllib.parse import urlsplit

import pytest
import torch
from deposits import deposit
from members import TIMEOUT
from small_run import Run

from hetero_pp.config.checkpoint import OpenCheckpoint
from hetero_pp.core.errors import Refused, StoreError
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc import exchange_client
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from hetero_pp.store.presigned import download_range
from hetero_pp.store.store import Store
from replica_groups.exchange.log import checkpoint_key
from replica_groups.exchange.server import serve_exchange
from replica_groups.rounds import events as e

SECRET = Secret("a secret")


@contextmanager
def _member(run: Run, name: str) -> Iterator[tuple[ExchangeClient, int]]:
    """Let another process take a slot over the network. Yield its client and the generation to which it contributes."""
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    parts = urlsplit(run.exchange.log.store.sign("GET", "any", 60) or "")
    stores = [f"{parts.scheme}://{parts.netloc}"]
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials(name), "run", stores=stores)
    run.exchange.died(name, "to be taken over the network")
    client.join(name, "")
    try:
        yield client, client.assign(name, 0).generation
    finally:
        client.close()
        server.stop(None).wait()


def _addresses(run: Run, name: str) -> list[BlobAddress]:
    return [BlobAddress("run", 1, name, block) for block in sorted(run.roster.blocks[name])]


def _forbidden(*_: object) -> None:
    raise AssertionError("it went by the exchange")


def test_blobs_go_to_the_store_and_come_from_it(signing: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(signing, {"a": 1, "b": 1}, quorum=1.0)
    with _member(run, "a") as (client, generation):
        monkeypatch.setattr(run.exchange, "deposit_blob", _forbidden)
        monkeypatch.setattr(run.exchange.decided, "fetch_many", _forbidden)
        run.assign(0, "b")
        for address in _addresses(run, "a"):
            deposit(client, "a", address, run.blob(address), generation, 7)
            deposit(client, "a", address, run.blob(address), generation, 7)  # as after a lost answer
        monkeypatch.undo()
        run.deposit(1, "b")
        assert run.counted(1) == {"a": 2, "b": 1}
        assert [one.steps for one in client.record(1, "a").contributions] == [7, 7]
        monkeypatch.setattr(run.exchange.decided, "fetch_many", _forbidden)
        for name in ("a", "b"):
            for address in _addresses(run, name):
                assert client.fetch("a", 1, name, address.block) == run.blob(address)
        assert not [key for key in signing.below() if key.endswith(".uploaded")]
        assert run.exchange.runner.refusals.counts.total() == 0


def test_what_comes_late_is_not_sent_at_all(signing: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(signing, {"a": 1, "b": 1, "c": 1}, quorum=0.5)
    with _member(run, "a") as (client, generation):
        run.assign(0, "b", "c")
        run.deposit(1, "b", "c")
        run.passes(200.0)
        assert run.counted(1) == {"b": 1, "c": 1}
        objects, told, tell = signing.below(), list[e.Event](), run.exchange.runner.tell

        def noted(event: e.Event) -> Sequence[e.Effect]:
            told.append(event)
            return tell(event)

        monkeypatch.setattr(run.exchange.runner, "tell", noted)
        for address in _addresses(run, "a"):
            deposit(client, "a", address, run.blob(address), generation, 7)
        assert signing.below() == objects
        late = [(event.block, event.entry) for event in told if isinstance(event, e.Deposited)]
        assert late == [(address.block, None) for address in _addresses(run, "a")]


def test_who_says_what_is_not_so_is_refused_and_counted(signing: Store) -> None:
    run = Run(signing, {"a": 1, "b": 1}, quorum=1.0)
    with _member(run, "a") as (client, generation):
        own, other = _addresses(run, "a")[0], BlobAddress("run", 1, "b", "norm")
        digest = hashlib.sha256(run.blob(own)).digest()
        for address, words in ((own, "was not uploaded"), (other, "does not belong to this member")):
            blob = pb.BlobHeader(round=1, replica=address.replica, block=address.block, generation=generation)
            with pytest.raises(Refused, match=words):
                _ask(client, "Uploaded", _with(blob, digest))
        with pytest.raises(Refused, match="does not belong to this member"):
            _ask(client, "UploadUrl", _with(blob, digest))
        blob = pb.BlobHeader(round=1, replica="a", block=own.block, generation=generation)
        with pytest.raises(Refused, match="found a digest of 8 bytes, expected 32"):
            _ask(client, "Uploaded", _with(blob, digest[:8]))
        with pytest.raises(Refused, match=f"a: `{own.block}`: found 67108864 bytes, expected at most"):
            blob.size = 64 << 20
            _ask(client, "UploadUrl", _with(blob, digest))
        deposit(client, "a", own, run.blob(own), generation, 7)
        with pytest.raises(Refused, match=f"a second, different `{own.block}`"):
            deposit(client, "a", own, run.blob(own, seed=9), generation, 7)
        second = _addresses(run, "a")[1]
        with pytest.raises(Refused, match=f"a: {second.block}"):
            deposit(client, "a", second, b"no blob at all", generation, 7)
        with pytest.raises(Refused, match=f"`{second.block}`: a second, different blob to upload"):
            deposit(client, "a", second, run.blob(second), generation, 7)
        assert sum(key.endswith(".uploaded") for key in signing.below()) <= 1
        assert run.exchange.runner.refusals.counts.total() == 8


def _with(blob: pb.BlobHeader, digest: bytes) -> pb.BlobHeader:
    header = pb.BlobHeader(sha256=digest)
    header.MergeFrom(blob)
    return header


def _ask(client: ExchangeClient, call: str, request: pb.BlobHeader) -> None:
    with client._translated():
        client._wires.calls[call](request, metadata=client._metadata, timeout=TIMEOUT)


def test_a_member_that_does_not_reach_the_store_says_so_and_goes_by_the_exchange(
    signing: Store, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(signing, {"a": 1, "b": 1}, quorum=1.0)
    asked = list[str]()

    def elsewhere(method: str, key: str, seconds: float, size: int | None = None) -> str:
        asked.append(key)
        return f"http://127.0.0.1:{free_port}/{key}?X-Amz-Signature=secret"

    monkeypatch.setattr(signing, "sign", elsewhere)
    with _member(run, "a") as (client, generation):
        run.assign(0, "b")
        run.deposit(1, "b")
        for address in _addresses(run, "a"):
            deposit(client, "a", address, run.blob(address), generation, 7)
        assert run.counted(1) == {"a": 2, "b": 1}
        assert client.fetch("a", 1, "b", "norm") == run.blob(BlobAddress("run", 1, "b", "norm"))
    assert len([key for key in asked if key != "any"]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if "through the exchange" in line]
    assert (
        len(told) == 1
        and "cannot be uploaded (Connection refused); contributions and run checkpoints go through" in told[0]
    )


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "file:///etc/passwd", "https://attacker.example/x"])
def test_an_exchange_sends_its_members_to_no_other_host(
    signing: Store, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(signing, {"a": 1, "b": 1}, quorum=1.0)
    with _member(run, "a") as (client, generation):
        monkeypatch.setattr(signing, "sign", lambda *_: f"{url}?X-Amz-Signature=secret")
        monkeypatch.setattr(urllib.request.OpenerDirector, "open", _forbidden)
        run.assign(0, "b")
        run.deposit(1, "b")
        for address in _addresses(run, "a"):
            deposit(client, "a", address, run.blob(address), generation, 7)
        assert run.counted(1) == {"a": 2, "b": 1}
        assert client.fetch("a", 1, "b", "norm") == run.blob(BlobAddress("run", 1, "b", "norm"))
    assert f"{url}, expected a URL of http://127.0.0.1:" in capsys.readouterr().err


def test_what_was_removed_or_changed_in_the_store_is_told_as_it_is(
    signing: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(signing, {"a": 1, "b": 1}, quorum=1.0)
    with _member(run, "a") as (client, generation):
        run.assign(0, "b")
        run.deposit(1, "b")
        for address in _addresses(run, "a"):
            deposit(client, "a", address, run.blob(address), generation, 7)
        (key,) = (key for key in signing.below("round-000001/b") if "/norm." in key)
        data = bytearray(signing.get(key))
        data[len(data) // 2] ^= 1
        signing.put(key, bytes(data))
        (gone,) = (key for key in signing.below("round-000001/b") if "/lm_head." in key)
        signing.delete([gone])
        with pytest.raises(Refused, match="the contribution of b to round 1 is no longer in the log"):
            client.fetch("a", 1, "b", "lm_head")
        assert "go through the exchange" not in capsys.readouterr().err  # the store works
        with pytest.raises(Refused, match=r"/norm\.\w+\.blob is damaged: it does not match its digest"):
            client.fetch("a", 1, "b", "norm")
    assert (
        "does not match its digest; contributions and run checkpoints go through the exchange from now on"
    ) in capsys.readouterr().err


def _stored_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """Let the store have the run's checkpoint, and the exchange send none of it. Return its names, and its key."""
    run.log.write_checkpoint(run.checkpoint)
    run.exchange.decided.begin(run.checkpoint)  # a run begins with a run checkpoint that the store has
    monkeypatch.setattr(OpenCheckpoint, "pieces", _forbidden)
    return list(run.checkpoint.tensors()), checkpoint_key(0)


def _is_the_checkpoint(run: Run, found: Mapping[str, torch.Tensor]) -> bool:
    whole = run.checkpoint.tensors()
    return found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize("seconds_of_a_url", [exchange_client.SECONDS_OF_A_URL, -1.0])
def test_a_joiner_reads_the_run_checkpoint_from_the_store(
    signing: Store, seconds_of_a_url: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a URL is used up after each tensor, it asks for as many as there are tensors."""
    run, signed, sign = Run(signing, {"a": 1, "b": 1}), list[str](), signing.sign
    names, key = _stored_checkpoint(run, monkeypatch)
    monkeypatch.setattr(exchange_client, "SECONDS_OF_A_URL", seconds_of_a_url)
    with _member(run, "a") as (client, _):

        def noted(method: Literal["GET", "PUT"], key: str, seconds: float) -> str | None:
            signed.append(key)
            return sign(method, key, seconds)

        monkeypatch.setattr(signing, "sign", noted)
        arrived = list[int]()
        tensors = client.read_checkpoint(pb.CheckpointRequest(names=names, round=0), Caller("a"), arrived.append)
    assert _is_the_checkpoint(run, tensors)
    assert sum(arrived) == sum(one.nbytes for one in tensors.values())
    assert signed == [key] * (1 if seconds_of_a_url > 0 else len(names))


def test_a_run_checkpoint_that_was_altered_or_removed_in_the_store_comes_from_the_exchange(
    signing: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(signing, {"a": 1, "b": 1})
    names, key = _stored_checkpoint(run, monkeypatch)
    with _member(run, "a") as (client, _):
        assert client.checkpoint(names[:1], 0)  # the exchange has opened it
        monkeypatch.undo()
        data = bytearray(signing.get(key))
        signing.delete([key])
        assert _is_the_checkpoint(run, client.checkpoint(names, 0))
        assert "go through the exchange" not in capsys.readouterr().err  # the store works
        data[-1] ^= 1
        signing.put(key, bytes(data))
        assert _is_the_checkpoint(run, client.checkpoint(names, 0))
        last = capsys.readouterr().err
    assert "does not match its digest; contributions and run checkpoints go through the exchange from now on" in last


def test_a_part_of_an_object_is_what_was_asked_for(signing: Store) -> None:
    signing.put("key", bytes(range(100)))
    url, room = signing.sign("GET", "key", 60.0) or "", bytearray(10)
    download_range(url, 90, memoryview(room), TIMEOUT)
    assert room == bytes(range(90, 100))
    with pytest.raises(StoreError, match=r"found no 11 bytes from 90 on|cannot be downloaded"):
        download_range(url, 90, memoryview(bytearray(11)), TIMEOUT)
