"""Computes drawn rounds of replicas again, judges what they contributed, and keeps evidence that anybody can check.

Files of a drawn round arrive while later rounds are trained, so its judgement comes with a later round. Nothing waits
for it but the end of the run. A difference leaves a folder of evidence in the run's store:

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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from hetero_pp.config.audit import RecomputeSettings
from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import DamagedFile, HeteroPPError, OutOfMemory, StoreError
from hetero_pp.core.files import file_sha256
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.data.sources import Source
from hetero_pp.messages.messages_pb2 import ContributionEntry, Judgement, RoundRecord
from hetero_pp.messages.messages_pb2 import Recomputed as Finding
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.apply_round import FetchBlob, blocks_in
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.store.store import Store
from replica_groups.audit.commitments import BEFORE, MESSAGES, load_state
from replica_groups.audit.recompute import (
    Comparison,
    ReplicaHere,
    RoundStart,
    blame,
    compare,
    difference,
    recompute,
)
from replica_groups.audit.showing import ARRIVED, AUTHORITY, MANIFEST, ROUNDS_TO_SHOW, evidence_key
from replica_groups.exchange.log import ContributionLog, record_digest
from replica_groups.rounds.draws import draw_key

# ---- evidence ----

VERSION = 1

MOST_FILES = 10_000
MOST_OF_JSON = 8 << 20  # bytes of a JSON file that is read at once

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
    theta_sha256: _Digest  # digest of the parameters before the round (`parameters_sha256`)
    machine: Annotated[str, Field(max_length=1000)]  # where it was computed again
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
            path = store.path(key := f"{folder}/{name}")
            digests[name] = file_sha256(path) if path is not None else hashlib.sha256(store.get(key)).hexdigest()
    sealed = found.model_copy(update={"files": digests})
    store.put(f"{folder}/{MANIFEST}", sealed.model_dump_json(indent=1).encode())


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


# ---- drawn rounds ----

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_FINISH = 25.0  # longest time that the end of a run waits for checkpoints of its last rounds
MOST_OF_A_CAUSE = 250  # characters of a cause
_LARGEST = 1e300  # stands for a difference that has no number

Theta = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Seen:
    """A closed round, until its draw is known and the files of what it drew are here."""

    record: RoundRecord
    names: Sequence[str]  # names of all parameters
    kept: Scratch
    """The parameters before the round. They are on disk, because a round may wait for its files for a long time."""
    fetch: FetchBlob

    def theta(self) -> dict[str, Tensor]:
        """Read all parameters before the round into memory."""
        return {name: self.kept.read(name) for name in self.names}


@dataclass(frozen=True)
class _Drawn:
    """A round of a replica that was drawn, until its files are here."""

    seen: _Seen
    replica: str
    contributed: Mapping[str, bytes]  # its blobs, which the log may forget before its files are here


class Recomputation:
    """Judges drawn rounds of one run. Implements RoundCheck."""

    def __init__(
        self,
        spec: RunSpec,
        settings: RecomputeSettings,
        log: ContributionLog,
        source: Source | None,
        device: torch.device = CPU,
        folder: Path | None = None,
    ) -> None:
        """`source`: the run's text. `device`: where rounds are computed again. `folder` holds theta (Scratch)."""
        self.spec, self._settings, self._log, self._source, self._device = spec, settings, log, source, device
        self._folder = folder
        self._basis: Tensor | None = None
        self._undrawn: list[_Seen] = []
        self._waiting: list[_Drawn] = []

    def check(self, record: RoundRecord, theta: Theta, fetch: FetchBlob) -> Iterator[Judgement]:
        """Take a round, and yield what was found about this or earlier ones. As RoundCheck.check."""
        if any(entry.commitments for entry in record.contributions):
            kept = Scratch(self._folder)
            for name, tensor in theta.items():
                kept.keep(name, tensor)
            self._undrawn.append(_Seen(record, list(theta), kept, fetch))
        yield from self._judge_arrived(record.round)

    def finish(self) -> Iterator[Judgement]:
        """Yield what is found about the last rounds, whose files may still be on their way."""
        until = time.monotonic() + SECONDS_TO_FINISH
        while True:
            yield from self._judge_arrived(None)
            if not (self._undrawn or self._waiting) or time.monotonic() > until:
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _judge_arrived(self, round_: int | None) -> Iterator[Judgement]:
        """Judge the rounds whose files are here. `round_`: the newest one; older ones are given up after a time."""
        with suppress(StoreError):
            self._read_draws()
            for one in list(self._waiting):
                number = one.seen.record.round
                arrived = self._read(f"{evidence_key(number, one.replica)}/{ARRIVED}")
                if arrived is None and (round_ is None or number + 2 * ROUNDS_TO_SHOW > round_):
                    continue
                found: list[Judgement] = []
                if arrived is not None and arrived["missing"]:  # the exchange has drawn its own conclusions
                    self._forget(number, one.replica)
                elif arrived is not None:
                    with suppress(FileNotFoundError):  # another validator has judged it, and has removed its files
                        found = [self._recomputed(one)]
                self._waiting.remove(one)
                yield from found

    def _read_draws(self) -> None:
        """Read what was drawn. A draw is published with the first assignment after its round, in the order of rounds.

        A round that an exchange closed before it ended is never drawn, nor does a draw of a record hold that a run has
        removed when it resumed.
        """
        newest = 0
        for seen in list(self._undrawn):
            draw = self._read(draw_key(seen.record.round))
            if draw is None or draw["record"] != seen.record.sha256.hex():
                continue
            entries = {entry.replica: entry for entry in seen.record.contributions}
            for name in draw["drawn"]:
                own = {blob.block: seen.fetch(name, blob.block) for blob in entries[name].blobs}
                self._waiting.append(_Drawn(seen, name, own))
            self._undrawn.remove(seen)
            newest = seen.record.round
        self._undrawn = [one for one in self._undrawn if one.record.round > newest - ROUNDS_TO_SHOW]

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._log.store.get(key))
        except FileNotFoundError:
            return None

    # ---- one round of one replica ----

    def _recomputed(self, drawn: _Drawn) -> Judgement:
        seen, number, own = drawn.seen, drawn.seen.record.round, drawn.contributed
        entry = next(one for one in seen.record.contributions if one.replica == drawn.replica)
        with _files(self._log, evidence_key(number, entry.replica)) as folder:
            before = RunCheckpoint(number - 1, seen.theta(), self._basis_of_run())
            found, blobs = self.again(entry, number, before, own, folder)
        if found.is_equal:
            self._forget(number, entry.replica)
            return _judgement(number, entry.replica, found)
        hashes = {name: parameter_sha256(tensor) for name, tensor in seen.theta().items()}
        evidence = Evidence(
            version=VERSION,
            run=self.spec.run,
            round=number,
            replica=entry.replica,
            tolerance=self._settings.tolerance,
            difference=min(found.difference, _LARGEST),
            member=found.member,
            cause=found.cause[:MOST_OF_A_CAUSE],
            theta_sha256=parameters_sha256(hashes).hex(),
            machine=this_machine(),
            files={},
        )
        write_evidence(self._log.store, self.spec, seen.record, evidence, own, blobs)
        return _judgement(number, entry.replica, found, evidence_key(number, entry.replica))

    def again(
        self,
        entry: ContributionEntry,
        number: int,
        before: RunCheckpoint,
        contributed: Mapping[str, bytes],
        shown: Path,
    ) -> tuple[Comparison, Mapping[str, bytes]]:
        """Compute a replica's round again from the checkpoints in the folder `shown`; return the outcome and the blobs.

        `before`: theta and U before the round. A round that cannot be computed again counts as another one.
        """
        try:
            states = {one.member: load_state(shown / one.member / BEFORE) for one in entry.commitments}
            tokens = 0 if self.spec.at(number).outer.tokens is None else self._log.tokens_after(number - 1)
            met = self._met_before(number, entry.replica)
            start = RoundStart(number, before.parameters, before.basis, states, met, tokens)
            again = recompute(self.spec, entry.replica, start, entry.steps, self._source, self._device)
            file = shown / AUTHORITY
            authority = file.read_text(encoding="ascii") if file.is_file() else None
            messages = {
                one.member: (shown / one.member / MESSAGES).read_bytes() for one in entry.commitments if one.messages
            }
            found = self.compared(entry, number, contributed, again, messages, authority)
            return found, again.blobs
        except (OutOfMemory, StoreError):
            raise
        except HeteroPPError as error:
            member = entry.commitments[0].member if len(entry.commitments) == 1 else ""
            return Comparison(_LARGEST, f"its round cannot be computed again: {error}", member), {}

    def compared(
        self,
        entry: ContributionEntry,
        number: int,
        contributed: Mapping[str, bytes],
        again: ReplicaHere,
        messages: Mapping[str, bytes],
        authority: str | None = None,
    ) -> Comparison:
        """Compare a contribution, and name the stage of a group that computed something else if it can be told.

        `authority`: as for `blame`.
        """
        tolerance, compression = self._settings.tolerance, self.spec.config.outer.compression
        differences = {
            block: difference(
                BlobAddress(self.spec.run, number, entry.replica, block),
                shapes,
                compression,
                contributed[block],
                again.blobs[block],
            )
            for block, shapes in shapes_by_block(self.spec.parameter_shapes).items()
            if block in contributed
        }
        found = compare(entry, differences, again, tolerance)
        if found.is_equal:
            return found
        if len(again.members) == 1:
            return Comparison(found.difference, found.cause, next(iter(again.members)))
        differing = [block for block, one in differences.items() if one > tolerance]
        is_text = "another text" in found.cause
        holders = {one.member: one.holder for one in entry.commitments}
        named = blame(again, messages, differing, is_text, entry.generation, authority, holders)
        return found if named is None else Comparison(found.difference, named.cause, named.member)

    def _met_before(self, number: int, replica: str) -> frozenset[str]:
        """Return the blocks that earlier rounds synchronised, back to the last one that counted the replica."""
        met = frozenset[str]()
        for earlier in range(number - 1, max(0, number - 1 - self.spec.fragments.count), -1):
            record = self._log.read_record(earlier)
            met |= blocks_in(record)
            if any(one.replica == replica for one in record.contributions):
                break
        return met

    def _basis_of_run(self) -> Tensor | None:
        """Return U, which never changes, from any run checkpoint."""
        if self._basis is None and self.spec.largest_rank is not None:
            self._basis = self._log.read_checkpoint(min(self._log.checkpoints())).basis
        return self._basis

    def _forget(self, number: int, replica: str) -> None:
        """Remove what was shown for a round against which there is no finding by recomputation."""
        store = self._log.store
        store.delete(store.below(evidence_key(number, replica)))


@contextmanager
def _files(log: ContributionLog, folder: str) -> Iterator[Path]:
    """Yield the files that members showed, in a folder on this machine."""
    path = log.store.path(folder)
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hetero-pp-shown-") as scratch:
        for key in log.store.below(folder):
            to = Path(scratch) / key.removeprefix(f"{folder}/")
            to.parent.mkdir(parents=True, exist_ok=True)
            log.store.get_to(key, to)
        yield Path(scratch)


def _judgement(round_: int, replica: str, found: Comparison, evidence: str = "") -> Judgement:
    finding = Finding(
        is_equal=found.is_equal,
        difference=found.difference,
        member=found.member,
        cause=found.cause[:MOST_OF_A_CAUSE],
        evidence=evidence,
    )
    return Judgement(round=round_, replica=replica, recomputed=finding)
