"""Run log: run checkpoints, round records and the contributions that they name, as objects of a store.

    checkpoint-000000.safetensors
    round-000001/record.json
    round-000001/<replica>/<generation>/<block>.<digest>.blob
    round-000001/<replica>/<generation>/<digest>.blobs           several of one deposit, behind an index of them
    audited/round-000001.json
    audited/scores-000001.json
    incarnations/<slot>/<n>

theta after any round follows from a run checkpoint and the later records and contributions, bit for bit. Every object
is whole and durable before anybody is told of it, and is verified by its digest when it is read.

The first writer of a record or of an incarnation of a slot wins. A blob's name contains its digest, so that no
blob overwrites another. An exchange therefore holds nothing that cannot be read from here.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint, open_checkpoint, save_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.bounded import before_gap
from hetero_pp.core.errors import ConfigError, DamagedFile, MalformedContribution, StoreError
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import contribution_digest
from hetero_pp.store.folder import reading, storing, writing
from hetero_pp.store.store import Store
from replica_groups.exchange.audits import audit_key, audited, scored, scores_key

INCARNATIONS = "incarnations"
INCARNATIONS_KEPT = 64
"""Claims of each place that stay in the store. More than one stays, because a second exchange that does not know the
newest claims must not succeed with an older number."""

_NAMED_DIGITS = 16
"""Digits of a blob's digest in its name, enough to tell the blobs of one member, round and generation apart."""

UPLOADED = ".uploaded"
URL_SECONDS = 900.0
"""Seconds within which an upload or a download with a URL has to begin; large, because clocks differ."""

TOGETHER = ".blobs"
_INDEX_LENGTH = struct.Struct("<I")
_INDEX_BYTES_MAX = 1 << 20  # bytes of an index, at most: a deposit names a thousand blobs in less
_INDEXES = 256  # indexes in memory, a few hundred bytes each


class ContributionLog:
    """Reads and writes the log in one store. May be used by many threads and machines at once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._unsure: dict[str, bytes] = {}
        """Claims whose write failed, so that the store may have them or not, and their contents."""
        self.index = lru_cache(_INDEXES)(self._read_index)
        """`_read_index` of the objects that were read last. Their names follow from their contents."""

    # ---- contributions ----

    def write_blobs(self, blobs: Mapping[str, bytes]) -> None:
        """Write blobs of one round and generation of a replica, by key (`blob_key`).

        Several are one object, because each file takes a flush, an entry of its folder, and a block of the disk.
        """
        first, *others = blobs
        if not others:
            self.store.put(first, blobs[first])
            return
        folder = first.rpartition("/")[0]
        index = json.dumps([[key.rpartition("/")[2], len(data)] for key, data in blobs.items()]).encode()
        whole = b"".join((_INDEX_LENGTH.pack(len(index)), index, *blobs.values()))
        self.store.put(f"{folder}/{_index_digest(index)}{TOGETHER}", whole)

    def read_blob(self, key: str, sha256: bytes) -> bytes:
        """Return the blob with this digest. Raises DamagedFile if it differs, FileNotFoundError if there is none."""
        where = key
        try:
            data = self.store.get(key)
        except FileNotFoundError:
            folder = key.rpartition("/")[0]
            several = (f"{folder}/{name}" for name in self.store.names(folder) if name.endswith(TOGETHER))
            together = next((one for one in several if key in self.index(one)), None)
            if together is None:
                raise
            where = f"{together} ({key.rpartition('/')[2]})"
            data = self._read(together, *self.index(together)[key])
        if hashlib.sha256(data).digest() != sha256:
            raise DamagedFile(f"{self.store.url(where)} is damaged: it does not match its digest")
        return data

    def _read_index(self, together: str) -> Mapping[str, tuple[int, int]]:
        """Return the key of each blob in an object -> (first byte, size). Raises DamagedFile."""
        folder, _, name = together.rpartition("/")
        length = _INDEX_LENGTH.size
        try:
            (size,) = _INDEX_LENGTH.unpack(self._read(together, 0, length))
            index = self._read(together, length, size if size <= _INDEX_BYTES_MAX else 0)
            if f"{_index_digest(index)}{TOGETHER}" != name:
                raise ValueError("its index does not match its name")
            blobs = json.loads(index)
        except (struct.error, ValueError) as error:
            raise DamagedFile(f"{self.store.url(together)} is damaged: {error}") from None
        found, start = dict[str, tuple[int, int]](), length + size
        for blob, size in blobs:
            found[f"{folder}/{blob}"] = start, size
            start += size
        return found

    def _read(self, key: str, start: int, size: int) -> bytes:
        """Return part of an object, less if it is truncated. An object that is no file is read whole."""
        path = self.store.path(key)
        if path is None:
            return self.store.get(key)[start : start + size]
        with storing("read", path), path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def upload_url(self, key: str, size: int, is_guest: bool) -> str | None:
        """Return a URL at which a member may put the blob of this key into the store, so that it passes no exchange.

        None if the store has no such URLs. Where the length cannot be signed, only a guest gets none: it might fill the
        store.
        """
        url = self.store.sign("PUT", key + UPLOADED, URL_SECONDS, size)
        return self.store.sign("PUT", key + UPLOADED, URL_SECONDS) if url is None and not is_guest else url

    def take_upload(self, key: str, sha256: bytes, most: int) -> bytes:
        """Take over a blob that a member has uploaded, with this digest and of at most `most` bytes; return it.

        The member is not trusted: the blob is copied inside the store to its key, for which the member has no URL, and
        the copy is read. May be repeated. Raises MalformedContribution if something else is there, FileNotFoundError if
        nothing is.
        """
        try:
            data = self.read_blob(key, sha256)
        except (DamagedFile, FileNotFoundError):
            self.store.copy(key + UPLOADED, key)
            if (size := self.store.size(key)) > most:
                complaint = f"uploaded {size} bytes, expected at most {most}"
            else:
                try:
                    data, complaint = self.read_blob(key, sha256), ""
                except DamagedFile:
                    complaint = "uploaded other data than announced"
            if complaint:
                self.store.delete([key])
                raise MalformedContribution(complaint) from None
        self.store.delete([key + UPLOADED])
        return data

    def blobs_of(self, record: RoundRecord) -> Callable[[str, str], bytes]:
        """Return a function that reads the blob of (replica, block) in a record.

        It raises DamagedFile if the blob differs from the record, FileNotFoundError if it is missing or not included.
        """
        named = {
            (entry.replica, blob.block): (key_of(record, entry, blob), blob.sha256)
            for entry in record.contributions
            for blob in entry.blobs
        }

        def read(replica: str, block: str) -> bytes:
            if (replica, block) not in named:
                raise FileNotFoundError(f"no `{block}` of {replica} was included in round {record.round}")
            return self.read_blob(*named[replica, block])

        return read

    # ---- records ----

    def create_record(self, record: RoundRecord) -> RoundRecord:
        """Decide a round: return its record, which is this one or an earlier writer's.

        Fills in the digest. Raises DamagedFile if an earlier writer's record cannot be read.
        """
        record.sha256 = record_digest(record)
        text = MessageToJson(record, preserving_proto_field_name=True)
        if self.store.create(record_key(record.round), text.encode()):
            return record
        return self.read_record(record.round)

    def read_record(self, round_: int) -> RoundRecord:
        """Return a round's record. Raises FileNotFoundError if the round is not closed.

        Raises DamagedFile if it was altered.
        """
        where, data = self.store.url(record_key(round_)), self.store.get(record_key(round_))
        try:
            record = Parse(data, RoundRecord())
        except (ParseError, UnicodeDecodeError) as error:
            raise DamagedFile(f"{where} is damaged: {error}") from None
        if record.round != round_ or record.sha256 != record_digest(record):
            raise DamagedFile(f"{where} is damaged: it does not match its digest")
        return record

    def tokens_after(self, round_: int) -> int:
        """Return the tokens of the contributions of all rounds up to one; 0 if the log does not have its record."""
        try:
            return self.read_record(round_).tokens
        except FileNotFoundError:  # before round 1, or of a run that began with a run checkpoint of another log
            return 0

    def over_before(self, outer: OuterSettings, last_round: int) -> str:
        """Return how a run would end before its last closed round, beginning with the key; empty if it would not."""
        if outer.tokens is None:
            found, expected = outer.rounds or 0, f"at least {last_round}, the number of finished rounds"
            return f"rounds: found {found}, expected {expected}" if found < last_round else ""
        least = self.tokens_after(last_round - 1)
        expected = f"more than the {least:,} of the first {last_round - 1} rounds"
        return f"tokens: found {outer.tokens:,}, expected {expected}" if outer.tokens <= least else ""

    def records(self) -> set[int]:
        """Return the rounds that are closed. Raises DamagedFile as `last_record` does."""
        return {round_ for round_ in self._recorded() if self.has_record(round_)}

    def last_record(self) -> int:
        """Return the newest closed round, 0 if there is none. Looks at the newest rounds only.

        Raises DamagedFile for a record long after all others: counting up to it would take days.
        """
        return next((round_ for round_ in reversed(self._recorded()) if self.has_record(round_)), 0)

    def _recorded(self) -> list[int]:
        """Return the rounds that have any object, in order."""
        rounds = self._rounds()
        found = before_gap(rounds | ({0} if rounds else set()))
        for stray in sorted(rounds - set(found))[-1:]:
            if self.has_record(stray):
                told = f"the rounds between {found[-1]} and {stray} are missing; move it out of the log"
                raise DamagedFile(f"{self.store.url(round_key(stray))} does not belong to this run: {told}")
        return [round_ for round_ in found if round_]

    def has_record(self, round_: int) -> bool:
        """Return whether a round is closed; its record may be damaged."""
        return record_key(round_).rpartition("/")[2] in self.store.names(round_key(round_))

    def _rounds(self) -> set[int]:
        found = (re.fullmatch(r"round-(\d{6,12})/", name) for name in self.store.names())
        return {int(match[1]) for match in found if match}

    # ---- incarnations ----

    def claim_incarnation(self, slot: str, n: int) -> bool:
        """Claim the n-th incarnation of a slot; return whether this call won it."""
        key = f"{INCARNATIONS}/{slot}/{n}"
        mine = self._unsure.pop(key, None) or secrets.token_hex(16).encode()
        try:
            # What is there may be this very claim, if the store's first answer was lost.
            is_mine = self.store.create(key, mine) or self.store.get(key) == mine
        except StoreError:
            self._unsure[key] = mine
            raise
        if n > INCARNATIONS_KEPT:
            self.store.delete([f"{INCARNATIONS}/{slot}/{n - INCARNATIONS_KEPT}"])
        return is_mine

    def incarnations(self) -> dict[str, int]:
        """Return slot -> its highest claimed incarnation."""
        highest: dict[str, int] = {}
        for key in self.store.below(INCARNATIONS):
            match = re.fullmatch(rf"{INCARNATIONS}/(.+)/([1-9]\d*)", key)
            if match:
                highest[match[1]] = max(int(match[2]), highest.get(match[1], 0))
        return highest

    # ---- run checkpoints ----

    def write_checkpoint(self, checkpoint: RunCheckpoint) -> None:
        with writing(self.store, checkpoint_key(checkpoint.round)) as path:
            save_checkpoint(checkpoint, path)

    def read_checkpoint(self, round_: int) -> RunCheckpoint:
        """Return the run checkpoint after a round, in memory. Raises as `open_checkpoint`."""
        with self.open_checkpoint(round_) as file:
            return file.checkpoint()

    def open_checkpoint(self, round_: int) -> OpenCheckpoint:
        """Open the run checkpoint after a round, to read its tensors one at a time.

        Raises FileNotFoundError if there is none, DamagedFile if it was altered.
        """
        with reading(self.store, checkpoint_key(round_)) as path:
            file = open_checkpoint(path, self.store.url(checkpoint_key(round_)))
        if file.round != round_:
            raise DamagedFile(
                f"{self.store.url(checkpoint_key(round_))} is the run checkpoint after round {file.round}"
            )
        return file

    def checkpoints(self) -> set[int]:
        """Return the rounds that have a run checkpoint."""
        found = (re.fullmatch(r"checkpoint-(\d{6,12})\.safetensors", name) for name in self.store.names())
        return {int(match[1]) for match in found if match}

    # ---- going on from an earlier round ----

    def forget_after(self, round_: int) -> None:
        """Remove rounds and run checkpoints after the round from which a run resumes, and incomplete files.

        Incarnations stay, because a former holder of a slot must never seem to hold it again. An interruption leaves a
        log that can be read.
        """
        self.store.forget_parts()
        self.store.delete([checkpoint_key(number) for number in self.checkpoints() if number > round_])
        self.store.delete([audit_key(number) for number in audited(self.store) if number > round_])
        self.store.delete([scores_key(number) for number in scored(self.store) if number > round_])
        for number in sorted(self._rounds(), reverse=True):
            if number > round_:
                self.store.delete([record_key(number)])
                self.store.delete(self.store.below(round_key(number)))


def checkpoint_key(round_: int) -> str:
    return f"checkpoint-{round_:06d}.safetensors"


def record_key(round_: int) -> str:
    return f"{round_key(round_)}/record.json"


def blob_key(round_: int, replica: str, generation: int, block: str, sha256: bytes) -> str:
    return f"{round_key(round_)}/{replica}/{generation}/{block}.{sha256.hex()[:_NAMED_DIGITS]}.blob"


def key_of(record: RoundRecord, entry: ContributionEntry, blob: BlobEntry) -> str:
    return blob_key(record.round, entry.replica, entry.generation, blob.block, blob.sha256)


def _index_digest(index: bytes) -> str:
    """Return the name of an object of several blobs: the index has the digest of each in its name."""
    return hashlib.sha256(index).hexdigest()[:_NAMED_DIGITS]


def round_key(round_: int) -> str:
    return f"round-{round_:06d}"


def record_digest(record: RoundRecord) -> bytes:
    """Return the sha256 over all other fields of a record, which include the digests of its blobs."""
    digest = hashlib.sha256(struct.pack("<QQ", record.round, len(record.contributions)))
    for entry in record.contributions:
        _add_entry(digest.update, entry)
    for replica in (*record.late, *record.left_out):
        digest.update(_text(replica))
    if record.left_out:  # a record without is what it was before there were such
        digest.update(struct.pack("<Q", len(record.left_out)))
    return digest.digest()


def _add_entry(add: Callable[[bytes], None], entry: ContributionEntry) -> None:
    add(_text(entry.replica) + struct.pack("<d", entry.weight) + entry.digest)
    add(struct.pack("<QQQ", entry.generation, entry.steps, entry.tokens))
    add(contribution_digest(entry.blobs))
    add(struct.pack(f"<{2 * len(entry.blobs)}Q", *(n for b in entry.blobs for n in (b.size, b.kept_values))))
    if entry.scale:
        add(struct.pack("<d", entry.scale))
    if any(blob.norm for blob in entry.blobs):
        add(struct.pack(f"<{2 * len(entry.blobs)}f", *(n for b in entry.blobs for n in (b.norm, b.peak))))
    if entry.restarts:
        add(struct.pack(f"<{len(entry.blobs)}Q", *(blob.steps for blob in entry.blobs)))
    for restart in entry.restarts:
        add(_text(restart.slot) + struct.pack("<Q", restart.step))
    for one in entry.commitments:
        for part in (one.member.encode(), one.before, one.after, one.text, one.messages, one.rest):
            add(struct.pack("<Q", len(part)) + part)
        add(struct.pack("<IQ", one.holder, one.first))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def open_log(config: RunConfig, folder: RunFolder) -> ContributionLog:
    """Return the log. Raises ConfigError or StoreError, one line, if there is no such store."""
    return ContributionLog(config.store.open(config.name, folder.log))


def keep_configuration(config: RunConfig, folder: RunFolder, log: ContributionLog) -> None:
    """Write the run's configuration into a log that is not in the run's folder."""
    if config.store.url is not None:
        for path in (folder.config, folder.changes):
            if path.is_file():
                log.store.put_file(path.name, path)


def fetch_configuration(config: RunConfig, folder: RunFolder) -> None:
    """Create the folder of a run that began on another machine, and take the changes that other hosts have made."""
    if config.store.url is not None:
        store = open_log(config, folder).store
        for path in (folder.config, folder.changes):
            if path.name in store.names() and (path == folder.changes or not path.is_file()):
                store.get_to(path.name, path)


def require_unused(log: ContributionLog) -> None:
    """Raise ConfigError if the store of a new run has a run already, because nothing is ever overwritten."""
    if log.last_record() or log.checkpoints():
        raise ConfigError(
            ("store", "url"),
            f"found a run in {log.store.url()}, expected none; resume it with --resume, or use another `name`",
        )
