"""Evidence that a round was computed again, and differs: a folder in the run's store that anybody can check.

    evidence/000007-home/evidence.json               what was found, and the digest of every other file
    evidence/000007-home/run.json                    the run's configuration and its changes
    evidence/000007-home/record.json                 the record of the round
    evidence/000007-home/contributed/<block>.blob    what the replica contributed
    evidence/000007-home/recomputed/<block>.blob     what its round gives
    evidence/000007-home/<member>/before.safetensors the checkpoint that each member showed

Theta before the round is not in it: it follows from the run log, and its digest is in evidence.json.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from pydantic import BaseModel, Field, ValidationError

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.files import file_sha256
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.store.store import Store
from replica_groups.audit.showing import ARRIVED, MANIFEST, evidence_key
from replica_groups.exchange.log import record_digest

VERSION = 1

MOST_FILES = 10_000
MOST_OF_JSON = 8 << 20
"""Bytes of a JSON file that is read at once."""

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}){0,2}$")]


class Evidence(BaseModel):
    """Content of evidence.json."""

    version: int
    run: Annotated[str, Field(max_length=64)]
    round: Annotated[int, Field(ge=1)]
    replica: Annotated[str, Field(max_length=200)]
    tolerance: Annotated[float, Field(ge=0)]
    difference: float
    member: Annotated[str, Field(max_length=200)]
    cause: Annotated[str, Field(max_length=1000)]
    theta_sha256: _Digest
    """Digest of the parameters before the round (`parameters_sha256`)."""
    machine: Annotated[str, Field(max_length=1000)]
    """Where it was computed again."""
    files: Annotated[dict[_Name, _Digest], Field(max_length=MOST_FILES)]


def this_machine() -> str:
    """Return what the bits of a computation depend on, in words."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.system()}"


def write_evidence(
    store: Store,
    spec: RunSpec,
    record: RoundRecord,
    found: Evidence,
    contributed: Mapping[str, bytes],
    recomputed: Mapping[str, bytes],
) -> None:
    """Add to a folder of evidence what was found; `found.files` is filled in. The members' files are there."""
    folder = evidence_key(found.round, found.replica)
    contents = {f"contributed/{block}.blob": data for block, data in contributed.items()}
    contents |= {f"recomputed/{block}.blob": data for block, data in recomputed.items()}
    known = {"config": spec.config.model_dump(mode="json"), "changes": spec.changes.to_json()}
    contents["run.json"] = json.dumps(known, indent=1).encode()
    contents["record.json"] = MessageToJson(record, preserving_proto_field_name=True).encode()
    for name, data in contents.items():
        store.put(f"{folder}/{name}", data)
    shown = [key.removeprefix(f"{folder}/") for key in store.below(folder)]
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    for name in shown:
        if name not in {*contents, ARRIVED, MANIFEST}:
            digests[name] = _sha256(store, f"{folder}/{name}")
    sealed = found.model_copy(update={"files": digests})
    store.put(f"{folder}/{MANIFEST}", sealed.model_dump_json(indent=1).encode())


def _sha256(store: Store, key: str) -> str:
    path = store.path(key)
    return file_sha256(path) if path is not None else hashlib.sha256(store.get(key)).hexdigest()


def read_evidence(folder: Path) -> Evidence:
    """Return what a folder of evidence says. Raises DamagedFile, in one line, if it is none or is too large."""
    try:
        found = Evidence.model_validate_json(read_bounded(folder / MANIFEST, MOST_OF_JSON))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DamagedFile(f"{folder / MANIFEST} is no evidence: {where}: {first['msg']}") from None
    if found.version != VERSION:
        raise DamagedFile(f"{folder / MANIFEST}: found version {found.version}, expected {VERSION}")
    return found


def read_record(folder: Path) -> RoundRecord:
    """Return the record in a folder of evidence. Raises DamagedFile."""
    try:
        record = Parse(read_bounded(folder / "record.json", MOST_OF_JSON), RoundRecord())
    except (ParseError, UnicodeDecodeError):
        raise DamagedFile(f"{folder / 'record.json'} is no round record") from None
    if record.sha256 != record_digest(record):
        raise DamagedFile(f"{folder / 'record.json'} does not match its digest")
    return record


def read_bounded(path: Path, most: int) -> bytes:
    """Return a file's bytes. Raises DamagedFile if it is missing, no file of its own, or larger than `most`."""
    try:
        if path.is_symlink() or not path.is_file() or (size := path.stat().st_size) > most:
            found = "no such file" if not path.is_file() or path.is_symlink() else f"{size} bytes"
            raise DamagedFile(f"{path}: found {found}, expected a file of at most {most} bytes")
        return path.read_bytes()
    except OSError as error:
        raise DamagedFile(f"{path}: {error.strerror}") from None
