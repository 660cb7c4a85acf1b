"""The log of a run: snapshots, round records and the contributions they name, as files.

    log/snapshot-000000.safetensors
    log/round-000001/record.json
    log/round-000001/<replica>/<block>.blob

theta after any round follows from a snapshot and the records and contributions since, bit for bit.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse

from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.messages_pb2 import RoundRecord


class ContributionLog:
    """Reads and writes the log under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_blob(self, address: BlobAddress, data: bytes) -> None:
        """Keep one blob."""
        _write_whole(self._blob_path(address.round, address.replica, address.block), data)

    def read_blob(self, round_: int, replica: str, block: str) -> bytes:
        """One blob of a round; FileNotFoundError if there is none."""
        return self._blob_path(round_, replica, block).read_bytes()

    def write_record(self, record: RoundRecord) -> None:
        """Keep a round record."""
        text = MessageToJson(record, preserving_proto_field_name=True)
        _write_whole(self._round(record.round) / "record.json", text.encode())

    def read_record(self, round_: int) -> RoundRecord:
        """A round's record; FileNotFoundError if the round is not closed."""
        return Parse((self._round(round_) / "record.json").read_text(), RoundRecord())

    def snapshots(self) -> set[int]:
        """After which rounds there is a snapshot."""
        names = (re.fullmatch(r"snapshot-(\d+)\.safetensors", path.name) for path in self.folder.glob("snapshot-*"))
        return {int(match[1]) for match in names if match}

    def forget_after(self, round_: int) -> None:
        """Remove rounds and snapshots later than a round that a run goes on from."""
        for path in [*self.folder.glob("round-*"), *self.folder.glob("snapshot-*")]:
            number = re.search(r"-(\d+)", path.name)
            if number is not None and int(number[1]) > round_:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def snapshot_path(self, round_: int) -> Path:
        return self.folder / f"snapshot-{round_:06d}.safetensors"

    def _round(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}"

    def _blob_path(self, round_: int, replica: str, block: str) -> Path:
        return self._round(round_) / replica / f"{block}.blob"


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
