"""Small blobs of one replica that are deposited in one call: each is checked, and all are kept or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from deposits import deposit, deposit_all
from small_run import Run

from hetero_pp.core.errors import Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient import contribution as limits
from hetero_pp.pseudo_gradient.contribution import BlobAddress, batches, join_blobs, split_blobs
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from replica_groups.exchange import contribution_inbox
from replica_groups.exchange.server import serve_exchange
from replica_groups.member.session import MemberSession

SECRET = Secret("a secret")
GENERATION, STEPS = 1, 7


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    run.assign(0)
    return run


@pytest.fixture
def served(run: Run) -> Iterator[ExchangeClient]:
    """A client of member a, as after it has joined."""
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run")
    client._incarnation = 1
    yield client
    client.close()
    server.stop(None).wait()


def _blobs(run: Run, seed: int = 0) -> dict[BlobAddress, bytes]:
    """Return all blobs of member a for round 1."""
    addresses = [BlobAddress("run", 1, "a", block) for block in sorted(run.roster.blocks["a"])]
    return {address: run.blob(address, seed) for address in addresses}


def _calls(run: Run) -> list[list[str]]:
    """Note the blocks of each deposit from now on."""
    found, deposit = list[list[str]](), run.exchange.inbox.take

    def noted(header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        found.append([one.block for one, _ in split_blobs(header, data)])
        deposit(header, data, caller)

    run.exchange.inbox.take = noted  # type: ignore[method-assign]
    return found


def _noted(run: Run) -> dict[str, bytes]:
    """Return block -> digest of what is noted of replica a."""
    opened = run.exchange.coordinator.open
    assert opened is not None
    own = opened.deposits.get("a")
    return {} if own is None else {block: entry.sha256 for block, entry in own.blobs.items()}


def test_as_many_go_together_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch leaves before the next one is made."""
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 5)
    sizes, made = {"a": 2, "b": 3, "c": 1, "d": 9, "e": 9, "f": 1}, list[str]()

    def blobs() -> Iterator[tuple[str, bytes]]:
        for block, size in sizes.items():
            made.append(block)
            yield block, bytes(size)

    found = [("".join(block for block, _ in batch), "".join(made)) for batch in batches(blobs())]
    assert found == [("ab", "abc"), ("c", "abcd"), ("d", "abcde"), ("e", "abcdef"), ("f", "abcdef")]


def test_a_member_deposits_its_small_blobs_in_one_call(run: Run, served: ExchangeClient) -> None:
    own, calls = {address.block: data for address, data in _blobs(run).items()}, _calls(run)
    MemberSession(served, "a", "a", "run").contribute(1, own.items(), GENERATION, STEPS)
    assert calls == [list(own)]
    run.deposit(1, "b")
    record = run.exchange.log.read_record(1)
    entries = {one.replica: one for one in record.contributions}
    assert entries["a"].steps == STEPS
    read = run.exchange.log.blobs_of(record)
    assert {block: read("a", block) for block in own} == own


def test_those_that_are_included_already_are_not_written_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = list[list[str]](), run.log.write_blobs

    def noting(blobs: Mapping[str, bytes]) -> None:
        written.append([Path(key).name.rsplit(".", 2)[0] for key in blobs])
        write(blobs)

    monkeypatch.setattr(run.log, "write_blobs", noting)
    blobs = _blobs(run)
    first, *rest = blobs
    deposit(run.exchange, "a", first, blobs[first], GENERATION, STEPS)
    deposit_all(run.exchange, "a", blobs, GENERATION, STEPS)
    deposit_all(run.exchange, "a", blobs, GENERATION, STEPS)  # as after a lost answer
    assert written == [[first.block], [one.block for one in rest]]


def test_one_that_is_malformed_or_a_second_different_one_keeps_the_others_out(run: Run) -> None:
    blobs = _blobs(run)
    _, second, *_, last = blobs
    with pytest.raises(Refused, match=f"`?{last.block}"):
        deposit_all(run.exchange, "a", blobs | {last: blobs[last][:-1]}, GENERATION, STEPS)
    assert not _noted(run)
    assert not run.log.store.below("round-000001")
    deposit(run.exchange, "a", second, blobs[second], GENERATION, STEPS)
    before = _noted(run)
    with pytest.raises(Refused, match="a second, different"):
        deposit_all(run.exchange, "a", _blobs(run, seed=5), GENERATION, STEPS)
    assert _noted(run) == before
    deposit_all(run.exchange, "a", blobs, GENERATION, STEPS)  # nobody waits for the refused ones
    assert _noted(run).keys() == run.roster.blocks["a"]


def test_more_bytes_together_than_the_limit_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = join_blobs(pb.BlobHeader(round=1, replica="a"), [(block, bytes(10)) for block in _two(run)])
    run.exchange.inbox.expect(header, Caller("a"))
    monkeypatch.setattr(contribution_inbox, "BATCH_BYTES_MAX", 19)
    with pytest.raises(Refused, match="found 20 bytes of several blobs, expected at most 19"):
        run.exchange.inbox.expect(header, Caller("a"))


def _two(run: Run) -> list[str]:
    return sorted(run.roster.blocks["a"])[:2]
