"""The log of a run: snapshots, round records and the contributions they name, as files.

    log/snapshot-000000.safetensors
    log/round-000001/record.json
    log/round-000001/<replica>/<block>.blob

theta after any round follows from a snapshot and the records and contributions since, bit for bit. What is written is
whole and on the disk before anybody is told of it; what is read is held against its digest.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from hetero_pp.errors import DamagedFile
from hetero_pp.files import remove_parts, write_whole
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress, contribution_digest


class ContributionLog:
    """Reads and writes the log under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_blob(self, address: BlobAddress, data: bytes) -> None:
        """Keep one blob."""
        write_whole(self._blob_path(address.round, address.replica, address.block), data)

    def read_blob(self, round_: int, replica: str, block: str) -> bytes:
        """One blob of a round; FileNotFoundError if there is none. Its digest is in the round's record."""
        return self._blob_path(round_, replica, block).read_bytes()

    def write_record(self, record: RoundRecord) -> None:
        """Keep a round record."""
        text = MessageToJson(record, preserving_proto_field_name=True)
        write_whole(self._record_path(record.round), text.encode())

    def read_record(self, round_: int) -> RoundRecord:
        """A round's record; FileNotFoundError if the round is not closed.

        Raises DamagedFile if it is not what was written.
        """
        path = self._record_path(round_)
        try:
            record = Parse(path.read_text(), RoundRecord())
        except (ParseError, UnicodeDecodeError) as error:
            raise DamagedFile(f"{path} is damaged: {error}") from None
        if record.round != round_ or record.sha256 != record_digest(record):
            raise DamagedFile(f"{path} is damaged: it is not the record of its digest")
        return record

    def records(self) -> set[int]:
        """Which rounds are closed."""
        return {number for path in self.folder.glob("round-*/record.json") if (number := _round_of(path.parent))}

    def snapshots(self) -> set[int]:
        """After which rounds there is a snapshot."""
        numbers = (_round_of(path) for path in self.folder.glob("snapshot-*"))
        return {number for number in numbers if number is not None}

    def forget_after(self, round_: int) -> None:
        """Remove rounds and snapshots later than a round that a run goes on from, and files that are not whole."""
        remove_parts(self.folder)
        for path in [*self.folder.glob("round-*"), *self.folder.glob("snapshot-*")]:
            number = _round_of(path)
            if number is not None and number > round_:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def snapshot_path(self, round_: int) -> Path:
        return self.folder / f"snapshot-{round_:06d}.safetensors"

    def _round(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}"

    def _record_path(self, round_: int) -> Path:
        return self._round(round_) / "record.json"

    def _blob_path(self, round_: int, replica: str, block: str) -> Path:
        return self._round(round_) / replica / f"{block}.blob"


def record_digest(record: RoundRecord) -> bytes:
    """sha256 over a record's round and what it says of every contribution, down to the digests of its blobs."""
    digest = hashlib.sha256(struct.pack("<Q", record.round))
    for entry in record.contributions:
        name = entry.replica.encode()
        digest.update(struct.pack("<Qd", len(name), entry.weight) + name + entry.digest)
        digest.update(contribution_digest(entry.blobs))
        digest.update(
            struct.pack(f"<{2 * len(entry.blobs)}Q", *(n for b in entry.blobs for n in (b.size, b.kept_values)))
        )
    return digest.digest()


def _round_of(path: Path) -> int | None:
    """Of a file or folder that this log has written."""
    found = re.fullmatch(r"round-(\d{6,})|snapshot-(\d{6,})\.safetensors", path.name)
    return int(found[1] or found[2]) if found else None
