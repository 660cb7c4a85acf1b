"""`hetero-pp log verify`: check evidence that a replica contributed something else than its round gives."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from hetero_pp.config.audit import RecomputeSettings
from hetero_pp.config.changes import Changes
from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import ConfigError, DamagedFile, HeteroPPError
from hetero_pp.core.files import file_sha256
from hetero_pp.data.sources import open_source
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.program.report.output import announce
from hetero_pp.program.run_log import open_run
from hetero_pp.store.opening import folder_of, open_store
from hetero_pp.store.store import Store
from replica_groups.audit.recompute.compare import Comparison
from replica_groups.audit.recompute.evidence import MOST_OF_JSON, Evidence, read_bounded, read_evidence, read_record
from replica_groups.audit.recompute.recomputation import Recomputation
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.replay import Follower
from replica_groups.exchange.showing import DRAWS, EVIDENCE, MANIFEST, draw_key, settings_sha256
from replica_groups.member.committed_state import BEFORE, MESSAGES, messages_sha256, sha256_in
from replica_groups.rounds.draws import drawn, leads_to


def verify(evidence: str, log: str | None, corpus: str | None, tolerance: float | None) -> None:
    """Check evidence, print one line for each check, and then the verdict.

    `evidence`: a folder, or RUN/evidence/NAME. `log`: the run's log, if the folder is not in it. `corpus`: the run's
    text, if it is elsewhere on this machine. `tolerance`: another one than the evidence names.

    Raises ConfigError for what is no evidence, HeteroPPError if the evidence does not prove its finding.
    """
    with _opened(evidence, log) as (folder, run_log):
        check = _Check(folder, run_log, corpus, tolerance)
        for line in check.lines():
            announce(line)
        found = check.recomputed()
        announce(f"recomputed: {found.cause or 'the contribution is what its round gives'}")
        own = check.evidence
        if found.is_equal:
            equal = f"round {own.round} of {own.replica} is what it should be"
            raise HeteroPPError(f"{evidence}: {equal}: nothing is proven")
        who = found.member or own.replica
        announce(f"proven: {who} computed something else in round {own.round} of {own.replica}")


@contextmanager
def _opened(evidence: str, log: str | None) -> Iterator[tuple[Path, ContributionLog]]:
    """Yield the folder of evidence on this machine, and the run's log. Raises ConfigError if there is none."""
    here = folder_of(evidence)
    path, mark, options = (evidence, "", "") if here is not None else evidence.partition("?")
    head, is_below, name = path.rstrip("/").rpartition(f"/{EVIDENCE}/")
    if here is not None and here.is_dir():
        if log is None and not is_below:
            raise ConfigError((), f"{evidence}: found no run log around it, expected --log")
        yield here, ContributionLog(open_store(log or head))
        return
    store = _store_of(f"{head}{mark}{options}") if is_below else None
    keys = [] if store is None or f"{EVIDENCE}/" not in store.names() else store.below(f"{EVIDENCE}/{name}")
    if store is None or not keys:
        expected = "expected a folder of evidence, such as runs/quickstart/evidence/000007-home"
        raise ConfigError((), f"{evidence}: found no evidence, {expected}")
    with tempfile.TemporaryDirectory(prefix="hetero-pp-evidence-") as scratch:
        for key in keys:
            to = Path(scratch) / key
            to.parent.mkdir(parents=True, exist_ok=True)
            store.get_to(key, to)
        yield Path(scratch) / EVIDENCE / name, ContributionLog(store if log is None else open_store(log))


def _store_of(run: str) -> Store:
    """Return the store of a run's log, by the run's folder or the log's URL."""
    if (path := folder_of(run)) is None:
        return open_store(run)
    folder = RunFolder(path)
    return open_run(path.parent, path.name)[1].store if folder.config.is_file() else open_store(str(folder.log))


@dataclass
class _Check:
    """Checks of one folder of evidence. Each raises DamagedFile or HeteroPPError if it does not hold."""

    folder: Path
    log: ContributionLog
    corpus: str | None
    tolerance: float | None

    @cached_property
    def evidence(self) -> Evidence:
        return read_evidence(self.folder)

    @cached_property
    def record(self) -> RoundRecord:
        return read_record(self.folder)

    @cached_property
    def entry(self) -> ContributionEntry:
        found = [one for one in self.record.contributions if one.replica == self.evidence.replica]
        if len(found) != 1 or self.record.round != self.evidence.round or not found[0].commitments:
            raise DamagedFile(f"{self.folder}: its record has no contribution of {self.evidence.replica} to check")
        return found[0]

    @cached_property
    def spec(self) -> RunSpec:
        known = parse_json(read_bounded(self.folder / "run.json", MOST_OF_JSON).decode(errors="replace"))
        try:
            config = RunConfig.model_validate(known["config"])
            if self.corpus is not None:
                config = config.model_copy(update={"data": config.data.model_copy(update={"corpus": self.corpus})})
            spec = RunSpec(config, load_tokenizer(config.data).vocabulary, Changes.from_json(known["changes"]))
        except (ValidationError, KeyError, TypeError) as error:
            raise DamagedFile(f"{self.folder / 'run.json'} is no configuration ({type(error).__name__})") from None
        if spec.run != self.evidence.run:
            raise DamagedFile(f"{self.folder / 'run.json'} is the configuration of another run")
        return spec

    @property
    def _own(self) -> RecomputeSettings:
        return self.spec.config.audit.recompute or RecomputeSettings()

    def lines(self) -> Iterator[str]:
        """Yield a line for each check that holds."""
        yield self._files()
        yield self._of_the_log()
        yield self._draw()
        yield self._commitments()
        yield self._contribution()

    def _files(self) -> str:
        for name, digest in self.evidence.files.items():
            path = self.folder / name
            if path.is_symlink() or not path.is_file() or file_sha256(path) != digest:
                raise DamagedFile(f"{path}: does not have the digest that {self.folder.name} names")
        return f"files: {len(self.evidence.files)} files have their digests"

    def _of_the_log(self) -> str:
        if self.log.read_record(self.record.round).sha256 != self.record.sha256:
            raise HeteroPPError(f"{self.folder}: its record is not that of round {self.record.round} of the log")
        return f"record: it is that of round {self.record.round} of the log"

    def _draw(self) -> str:
        round_, store = self.record.round, self.log.store
        try:
            draw = parse_json(store.get(draw_key(round_)).decode(errors="replace"))
            chain = parse_json(store.get(f"{DRAWS}/{draw['chain'][:16]}.json").decode(errors="replace"))
            secret, end, first = bytes.fromhex(draw["secret"]), bytes.fromhex(chain["end"]), int(chain["first"])
            replicas = [entry.replica for entry in self.record.contributions if entry.commitments]
            is_right = leads_to(secret, round_, first, end)
            is_right &= self.entry.replica in drawn(secret, self.record.sha256, replicas, float(chain["share"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"{store.url(draw_key(round_))} cannot be read ({type(error).__name__})") from None
        if chain.get("settings") != settings_sha256(self.spec) or self.evidence.tolerance != self._own.tolerance:
            raise HeteroPPError(f"{self.folder / 'run.json'} has other settings than the run had in round {round_}")
        if not is_right:
            raise HeteroPPError(f"{self.folder}: {self.entry.replica} was not drawn by the secret of round {round_}")
        return f"draw: {self.entry.replica} was drawn by the record and a secret of the chain from round {first} on"

    def _commitments(self) -> str:
        for one in self.entry.commitments:
            if one.member not in self.spec.members:
                raise HeteroPPError(f"{self.folder}: found a commitment of `{one.member[:80]}`, which is no member")
            path = self.folder / one.member
            self._require_listed(one.member, {BEFORE, MESSAGES} if one.messages else {BEFORE})
            if sha256_in(path / BEFORE) != one.before:
                raise HeteroPPError(f"{path / BEFORE} is not the checkpoint that {one.member} committed to")
            if one.messages and messages_sha256((path / MESSAGES).read_bytes()) != one.messages:
                raise HeteroPPError(f"{path / MESSAGES} is not what {one.member} committed to")
        return f"commitments: {len(self.entry.commitments)} checkpoints are those that the record names"

    def _require_listed(self, member: str, names: set[str]) -> None:
        """Raise DamagedFile for a file without a digest in the evidence: it may be a link, or a pipe without an end."""
        if missing := {f"{member}/{name}" for name in names} - self.evidence.files.keys():
            raise DamagedFile(f"{self.folder / MANIFEST}: found no digest of {', '.join(sorted(missing))}")

    def _contribution(self) -> str:
        for blob in self.entry.blobs:
            path = self.folder / "contributed" / f"{blob.block}.blob"
            if hashlib.sha256(read_bounded(path, blob.size)).digest() != blob.sha256:
                raise HeteroPPError(f"{path} is not what the record names")
        return f"contribution: {len(self.entry.blobs)} blobs are those that the record names"

    def _before(self) -> RunCheckpoint:
        """Return theta before the round, from the log."""
        number, checkpoints = (
            self.evidence.round - 1,
            [one for one in self.log.checkpoints() if one < self.evidence.round],
        )
        if not checkpoints:
            raise DamagedFile(f"{self.log.store.url()}: found no run checkpoint before round {self.evidence.round}")
        checkpoint = self.log.read_checkpoint(max(checkpoints))
        follower = Follower(self.spec.run, checkpoint, round_optimizer(self.spec, checkpoint.basis))
        for round_ in range(checkpoint.round + 1, number + 1):
            record = self.log.read_record(round_)
            follower.apply(record, self.log.blobs_of(record))
        return follower.checkpoint()

    def recomputed(self) -> Comparison:
        """Compute the round again, and compare."""
        before = self._before()
        hashes = {name: parameter_sha256(tensor) for name, tensor in before.parameters.items()}
        if parameters_sha256(hashes).hex() != self.evidence.theta_sha256:
            raise HeteroPPError(f"{self.folder}: the log gives other parameters before round {self.evidence.round}")
        announce(f"theta: the log gives the parameters before round {self.evidence.round}")
        tolerance = self.evidence.tolerance if self.tolerance is None else self.tolerance
        settings = self._own.model_copy(update={"tolerance": tolerance})
        with tempfile.TemporaryDirectory(prefix="hetero-pp-tokens-") as cache:
            source = open_source(self.spec.config.data, Path(cache))
            again = Recomputation(self.spec, settings, self.log, source)
            blobs = {
                one.block: (self.folder / "contributed" / f"{one.block}.blob").read_bytes() for one in self.entry.blobs
            }
            return again.again(self.entry, self.evidence.round, before, blobs, self.folder)[0]
