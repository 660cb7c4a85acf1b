"""The run log: what it decides, and which damage it detects on reading."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from deposits import keyed

from hetero_pp.core.errors import DamagedFile
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress, contribution_digest
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import INCARNATIONS_KEPT, ContributionLog, blob_key, record_digest

BLOB = b"a blob of the norm"


@pytest.fixture
def log(tmp_path: Path) -> ContributionLog:
    return ContributionLog(FolderStore(tmp_path / "log"))


def _record(round_: int = 1, generation: int = 2, steps: int = 50) -> RoundRecord:
    blobs = [BlobEntry(block="norm", sha256=hashlib.sha256(BLOB).digest(), size=len(BLOB), kept_values=3)]
    entry = ContributionEntry(replica="home", weight=1.0, digest=contribution_digest(blobs), blobs=blobs)
    entry.generation, entry.steps, entry.tokens = generation, steps, steps * 256
    return RoundRecord(round=round_, contributions=[entry], late=["dc"])


def test_the_first_record_is_read_as_it_was_written_and_all_that_it_says_is_in_its_digest(
    log: ContributionLog,
) -> None:
    first = log.create_record(_record())
    assert first.sha256 == record_digest(first)
    assert log.create_record(_record(steps=49)) == log.read_record(1) == first
    others = [_record(generation=3), _record(steps=49), _record(), _record(), _record()]
    others[2].contributions[0].tokens = 1
    others[3].late[0] = "DC"
    others[4].late.append("office")
    assert len({record_digest(one) for one in (_record(), *others)}) == 6


def test_a_first_record_that_is_damaged_is_named(log: ContributionLog) -> None:
    log.store.put("round-000001/record.json", b"{")
    with pytest.raises(DamagedFile, match=r"/round-000001/record\.json is damaged"):
        log.create_record(_record())


def test_blobs_are_of_the_generation_that_was_counted(log: ContributionLog) -> None:
    """A group that trained the round twice may have either generation included."""
    address = BlobAddress("run", 1, "home", "norm")
    log.write_blobs(keyed({address: BLOB}, 2))
    log.write_blobs(keyed({address: b"another generation's"}, 3))
    record = log.create_record(_record(generation=2))
    read = log.blobs_of(record)
    assert read("home", "norm") == BLOB
    with pytest.raises(FileNotFoundError, match="no `norm` of dc was included in round 1"):
        read("dc", "norm")
    log.write_blobs(keyed({address: BLOB[:-1] + b"M"}, 2))  # for example from a group that another coordinator formed
    assert read("home", "norm") == BLOB
    log.store.put(blob_key(1, "home", 2, "norm", hashlib.sha256(BLOB).digest()), BLOB[:-1] + b"M")
    with pytest.raises(
        DamagedFile, match=r"/round-000001/home/2/norm\.[0-9a-f]{16}\.blob is damaged: it does not match its digest"
    ):
        read("home", "norm")


def test_the_blobs_of_a_deposit_are_one_object(log: ContributionLog) -> None:
    """An index in front of them has their names, sizes and digests, and gives the object its name."""
    blobs = {"norm": BLOB, "layers.0": b"first layer" * 9, "empty": b""}
    log.write_blobs(keyed({BlobAddress("run", 1, "home", block): data for block, data in blobs.items()}, 2))
    (together,) = log.store.below("round-000001")
    digests = {block: hashlib.sha256(data).digest() for block, data in blobs.items()}
    keys = {block: blob_key(1, "home", 2, block, digest) for block, digest in digests.items()}
    assert {block: log.read_blob(keys[block], digests[block]) for block in blobs} == blobs
    with pytest.raises(FileNotFoundError):
        log.read_blob(blob_key(1, "home", 3, "norm", digests["norm"]), digests["norm"])
    whole = log.store.get(together)
    log.store.put(together, whole[:-1] + b"?")
    with pytest.raises(DamagedFile, match=r"\.blobs \(layers\.0\.[0-9a-f]{16}\.blob\) is damaged: it does not match"):
        log.read_blob(keys["layers.0"], digests["layers.0"])
    for damaged in (whole[:4], whole[:20], b"\xff" * 4 + whole[4:], whole.replace(b"norm", b"form"), b""):
        log.store.put(together, damaged)
        with pytest.raises(DamagedFile, match=r"/round-000001/home/2/[0-9a-f]{16}\.blobs is damaged: "):
            ContributionLog(log.store).read_blob(keys["norm"], digests["norm"])


def test_which_rounds_are_closed(log: ContributionLog) -> None:
    assert (log.records(), log.last_record()) == (set(), 0)
    for round_ in (1, 2, 3):
        log.create_record(_record(round_))
    log.write_blobs(keyed({BlobAddress("run", 4, "home", "norm"): BLOB}, 1))
    log.write_blobs(keyed({BlobAddress("run", 5, "home", "norm"): BLOB}, 1))
    assert (log.records(), log.last_record()) == ({1, 2, 3}, 3)
    log.forget_after(2)
    assert (log.records(), log.last_record()) == ({1, 2}, 2)
    assert log.store.names() == ["round-000001/", "round-000002/"]


def test_a_incarnation_is_had_once(log: ContributionLog) -> None:
    assert log.incarnations() == {}
    assert log.claim_incarnation("home.0", 1)
    assert not log.claim_incarnation("home.0", 1)
    assert log.claim_incarnation("home.0", 2)
    assert log.claim_incarnation("dc", 10) and log.claim_incarnation("dc", 9)
    assert log.incarnations() == {"home.0": 2, "dc": 10}
    log.forget_after(0)
    assert log.incarnations() == {"home.0": 2, "dc": 10}


def test_old_claims_of_a_slot_are_removed(log: ContributionLog) -> None:
    for n in range(1, INCARNATIONS_KEPT + 4):
        assert log.claim_incarnation("home.0", n)
    assert len(log.store.below("incarnations")) == INCARNATIONS_KEPT
    assert log.incarnations() == {"home.0": INCARNATIONS_KEPT + 3}
    assert not log.claim_incarnation("home.0", INCARNATIONS_KEPT + 2)


class _AnswersGetLost(FolderStore):
    """A store that creates the object but answers that it existed, as when the answer to a first attempt got lost."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return False


def test_a_claim_whose_answer_was_lost_is_had(tmp_path: Path) -> None:
    log = ContributionLog(_AnswersGetLost(tmp_path))
    assert log.claim_incarnation("home.0", 1)
    assert not log.claim_incarnation("home.0", 1)
    assert log.create_record(_record()) == _record_with_digest()


def _record_with_digest() -> RoundRecord:
    record = _record()
    record.sha256 = record_digest(record)
    return record
