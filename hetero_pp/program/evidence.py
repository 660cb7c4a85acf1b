"""`hetero-pp log verify`: check evidence that a replica contributed something else than its round gives."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from hetero_pp.config.audit import RecomputeSettings
from hetero_pp.config.changes import Changes
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
from replica_groups.audit.commitments import BEFORE, MESSAGES, messages_sha256, sha256_in
from replica_groups.audit.recomputation import (
    MOST_OF_JSON,
    Evidence,
    Recomputation,
    read_bounded,
    read_evidence,
    read_record,
)
from replica_groups.audit.showing import EVIDENCE, MANIFEST, settings_sha256
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.replay import checkpoint_after
from replica_groups.rounds.draws import DRAWS, draw_key, drawn, leads_to


def verify(evidence: str, log: str | None, corpus: str | None, tolerance: float | None) -> None:
    """Check evidence, print one line for each check that holds, and then the verdict.

    `evidence`: a folder, or RUN/evidence/NAME. `log`: the run's log, if the folder is not in it. `corpus`: the run's
    text, if it is elsewhere on this machine. `tolerance`: another one than the evidence names.

    Raises ConfigError for what is no evidence, DamagedFile or HeteroPPError if the evidence does not prove its finding.
    """
    with _opened(evidence, log) as (folder, run_log):
        claim = read_evidence(folder)
        for name, digest in claim.files.items():
            path = folder / name
            if path.is_symlink() or not path.is_file() or file_sha256(path) != digest:
                raise DamagedFile(f"{path}: does not have the digest that {folder.name} names")
        announce(f"files: {len(claim.files)} files have their digests")

        record = read_record(folder)
        if run_log.read_record(record.round).sha256 != record.sha256:
            raise HeteroPPError(f"{folder}: its record is not that of round {record.round} of the log")
        announce(f"record: it is that of round {record.round} of the log")

        entries = [one for one in record.contributions if one.replica == claim.replica]
        if len(entries) != 1 or record.round != claim.round or not entries[0].commitments:
            raise DamagedFile(f"{folder}: its record has no contribution of {claim.replica} to check")
        [entry] = entries
        spec = _spec(folder, claim, corpus)
        recomputes = spec.config.audit.recompute or RecomputeSettings()
        first = _require_drawn(folder, run_log, claim, entry, record, spec)
        announce(f"draw: {entry.replica} was drawn by the record and a secret of the chain from round {first} on")

        for one in entry.commitments:
            if one.member not in spec.members:
                raise HeteroPPError(f"{folder}: found a commitment of `{one.member[:80]}`, which is no member")
            path, names = folder / one.member, {BEFORE, MESSAGES} if one.messages else {BEFORE}
            # A file without a digest in the evidence may be a link, or a pipe without an end.
            if missing := {f"{one.member}/{name}" for name in names} - claim.files.keys():
                raise DamagedFile(f"{folder / MANIFEST}: found no digest of {', '.join(sorted(missing))}")
            if sha256_in(path / BEFORE) != one.before:
                raise HeteroPPError(f"{path / BEFORE} is not the checkpoint that {one.member} committed to")
            if one.messages and messages_sha256((path / MESSAGES).read_bytes()) != one.messages:
                raise HeteroPPError(f"{path / MESSAGES} is not what {one.member} committed to")
        announce(f"commitments: {len(entry.commitments)} checkpoints are those that the record names")

        blobs: dict[str, bytes] = {}
        for blob in entry.blobs:
            path = folder / "contributed" / f"{blob.block}.blob"
            blobs[blob.block] = read_bounded(path, blob.size)
            if hashlib.sha256(blobs[blob.block]).digest() != blob.sha256:
                raise HeteroPPError(f"{path} is not what the record names")
        announce(f"contribution: {len(entry.blobs)} blobs are those that the record names")

        try:
            before = checkpoint_after(run_log, spec.run, claim.round - 1, partial(round_optimizer, spec), [])
        except FileNotFoundError as error:
            raise DamagedFile(f"theta before round {claim.round}: {error}") from None
        hashes = {name: parameter_sha256(tensor) for name, tensor in before.parameters.items()}
        if parameters_sha256(hashes).hex() != claim.theta_sha256:
            raise HeteroPPError(f"{folder}: the log gives other parameters before round {claim.round}")
        announce(f"theta: the log gives the parameters before round {claim.round}")

        settings = recomputes.model_copy(update={"tolerance": claim.tolerance if tolerance is None else tolerance})
        with tempfile.TemporaryDirectory(prefix="hetero-pp-tokens-") as cache:
            source = open_source(spec.config.data, Path(cache))
            again = Recomputation(spec, settings, run_log, source)
            found = again.again(entry, claim.round, before, blobs, folder)[0]
        announce(f"recomputed: {found.cause or 'the contribution is what its round gives'}")
        if found.is_equal:
            equal = f"round {claim.round} of {claim.replica} is what it should be"
            raise HeteroPPError(f"{evidence}: {equal}: nothing is proven")
        who = found.member or claim.replica
        announce(f"proven: {who} computed something else in round {claim.round} of {claim.replica}")


def _spec(folder: Path, claim: Evidence, corpus: str | None) -> RunSpec:
    """Return the run of the evidence, with its text at `corpus` if given. Raises DamagedFile for another run's."""
    path = folder / "run.json"
    known = parse_json(read_bounded(path, MOST_OF_JSON).decode(errors="replace"))
    try:
        config = RunConfig.model_validate(known["config"])
        if corpus is not None:
            config = config.model_copy(update={"data": config.data.model_copy(update={"corpus": corpus})})
        spec = RunSpec(config, load_tokenizer(config.data).vocabulary, Changes.from_json(known["changes"]))
    except (ValidationError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is no configuration ({type(error).__name__})") from None
    if spec.run != claim.run:
        raise DamagedFile(f"{path} is the configuration of another run")
    return spec


def _require_drawn(
    folder: Path, log: ContributionLog, claim: Evidence, entry: ContributionEntry, record: RoundRecord, spec: RunSpec
) -> int:
    """Return the first round of the chain whose secret drew the replica. Raises HeteroPPError if none did."""
    round_, store = record.round, log.store
    try:
        draw = parse_json(store.get(draw_key(round_)).decode(errors="replace"))
        chain = parse_json(store.get(f"{DRAWS}/{draw['chain'][:16]}.json").decode(errors="replace"))
        secret, end, first = bytes.fromhex(draw["secret"]), bytes.fromhex(chain["end"]), int(chain["first"])
        replicas = [one.replica for one in record.contributions if one.commitments and not one.restarts]
        is_right = leads_to(secret, round_, first, end)
        is_right &= entry.replica in drawn(secret, record.sha256, replicas, float(chain["share"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{store.url(draw_key(round_))} cannot be read ({type(error).__name__})") from None
    recomputes = spec.config.audit.recompute or RecomputeSettings()
    if chain.get("settings") != settings_sha256(spec) or claim.tolerance != recomputes.tolerance:
        raise HeteroPPError(f"{folder / 'run.json'} has other settings than the run had in round {round_}")
    if not is_right:
        raise HeteroPPError(f"{folder}: {entry.replica} was not drawn by the secret of round {round_}")
    return first


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
    store = None
    if is_below and (run := folder_of(f"{head}{mark}{options}")) is None:
        store = open_store(f"{head}{mark}{options}")
    elif is_below and run is not None:  # the run's folder, or that of its log
        is_run = RunFolder(run).config.is_file()
        store = open_run(run.parent, run.name)[1].store if is_run else open_store(str(RunFolder(run).log))
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
