"""`hetero-pp log`: opens a run's log, rebuilds parameters from it, and measures the bytes of its contributions."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from hetero_pp.config.checkpoint import save_checkpoint
from hetero_pp.config.folder import RunFolder, recorded_run
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_trained
from hetero_pp.core.errors import ConfigError, DamagedFile, HeteroPPError
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_bytes, format_count
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.outer.apply_round import shapes_in
from hetero_pp.program.report.output import announce, say, standard_output
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob
from hetero_pp.pseudo_gradient.volume import RoundVolume, Volume
from hetero_pp.simulator.traffic import expected_volume
from hetero_pp.store.opening import folder_of, open_store
from replica_groups.exchange.log import ContributionLog, open_log
from replica_groups.exchange.replay import CheckedRound, LogCheck


def open_run(runs: Path, run: str) -> tuple[RunSpec, ContributionLog]:
    """Return a run's specification and its log. `run`: its name in `runs`, its folder or the URL of its log.

    A log in a store holds the run's configuration. Raises ConfigError if there is no such run here.
    """
    if (local := folder_of(run)) is not None:
        folder = recorded_run(runs, str(local))
        spec = read_trained(folder)
        return spec, open_log(spec.config, folder)
    log = ContributionLog(open_store(run))
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch))
        for path in (folder.config, folder.changes):
            if path.name in log.store.names():
                log.store.get_to(path.name, path)
        if not folder.config.is_file():
            raise ConfigError((), f"{log.store.url()}: found no config.yaml, expected a run log")
        return read_trained(folder), log


# ---- replay ----


def replay_run(runs: Path, run: str, round_: int | None, json_path: Path | None, to: Path | None) -> None:
    """Replay a run's log up to a round, verify every file that this reads, and print one line per round.

    `round_`: round to replay to; None means the last closed round. `json_path`: file for the findings, as JSON. `to`:
    file for the run checkpoint after that round.

    Raises ConfigError if the run or the round does not exist, HeteroPPError if a file is damaged, lost, or differs from
    what the log records.
    """
    if to is not None and to.exists():
        raise ConfigError((), f"--to {to}: found a file, expected a new name")
    spec, log = open_run(runs, run)
    url, checkpoints = log.store.url(), log.checkpoints()
    if not checkpoints:
        raise ConfigError((), f"{url}: found no run checkpoint, expected at least the first run checkpoint of the run")
    newest = max(log.last_record(), min(checkpoints))
    if round_ is not None and not min(checkpoints) <= round_ <= newest:
        found_none = f"found a round that the log in {url} does not have"
        raise ConfigError((), f"--round {round_}: {found_none}, expected {min(checkpoints)} to {newest}")
    last = newest if round_ is None else round_
    check, found = LogCheck(log, spec.run, partial(round_optimizer, spec)), list[CheckedRound]()
    for one in check.rounds(last):
        found.append(one)
        parts = [f"included {', '.join(one.replicas)}"] if one.replicas else []
        parts += [f"late {', '.join(one.late)}"] if one.late else []
        parts += [f"rejected {', '.join(one.left_out)}"] if one.left_out else []
        parts += ["parameters cannot be rebuilt" if one.sha256 is None else f"sha256 {one.sha256[:16]}…"]
        parts += ["equal to the audit"] if one.is_audited else []
        parts += ["equal to the run checkpoint"] if one.has_checkpoint else []
        parts += [f"DAMAGED: {line}" for line in one.damaged]
        announce(f"round {one.round}: {'; '.join(parts)}")
    write_json(json_path, {"run": spec.config.name, "rounds": [asdict(one) for one in found]})
    checkpoint = check.checkpoint(last)
    if to is not None and checkpoint is not None:
        save_checkpoint(checkpoint, to)
    damaged = sum(len(one.damaged) for one in found)
    if damaged:
        raise HeteroPPError(f"{url}: {damaged} files are damaged, missing, or differ from the log")
    if checkpoint is None:
        raise HeteroPPError(f"{url}: the run has removed rounds before they were read: replay it again")
    written = f", written to {to}" if to is not None else ""
    rounds = spec.latest.rounds
    which = f" of {rounds}, the last closed one" if round_ is None and last < rounds else ""
    announce(f"{spec.config.name} after round {last}{which}: sha256 {found[-1].sha256}{written}")


# ---- volume ----

WAYS = {
    "gather": "to an exchange, a store, or a parameter server",
    "ring_all_gather": "passed on as they are",
    "ring_all_reduce": "sums of dense contributions",
    "sparse_ring": "sums of sparse contributions, which grow",
}


def print_volume(runs: Path, run: str, json_path: Path | None) -> None:
    """Print the mean bytes that one replica sends per round with each collective, measured and by formula.

    Rounds count only if the log still has their contributions. Raises ConfigError if there is no such run or no such
    round, HeteroPPError if a file is damaged.
    """
    spec, log = open_run(runs, run)
    rounds, found = sorted(log.records()), list[dict[str, Any]]()
    for round_ in rounds:
        record = log.read_record(round_)
        try:
            measured = measured_volume(spec, log, record)
        except FileNotFoundError as error:
            if spec.latest.store.history == "recent":  # which removes old contributions
                continue
            raise DamagedFile(f"{error.filename or error}: a contribution to round {round_} is missing") from None
        replicas = [entry.replica for entry in record.contributions]
        if measured is not None:
            by_formula = expected_volume(spec, len(replicas), round_)
            volumes = {"measured": asdict(measured), "by_formula": asdict(by_formula)}
            found.append({"round": round_, "replicas": replicas} | volumes)
    if not found:
        told = "found no complete round, expected at least one with all of its contributions"
        raise ConfigError((), f"{log.store.url()}: {told}")
    write_json(json_path, {"run": spec.config.name, "rounds": found})
    console, counts = standard_output(), sorted({len(one["replicas"]) for one in found})
    replicas_told = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    of_all = "" if len(found) == len(rounds) else f" of {len(rounds)} (other contributions were removed)"
    counted = format_count(len(found), "round")
    say(console, f"{spec.config.name}: bytes sent by one of {replicas_told}, mean over {counted}{of_all}")
    table = PlainTable(["exchanged by"], ["a round", "by formula", "ratio", "all rounds"], ["what is sent"])
    for way, what in WAYS.items():
        pairs = [(one["measured"][way], one["by_formula"][way]) for one in found]
        known = [(own, formula) for own, formula in pairs if own is not None and formula is not None]
        if not known:
            table.add_row(way, "–", "–", "–", "–", what)
            continue
        own, formula = (fmean(side) for side in zip(*known, strict=True))
        ratio = "–" if formula == 0 else f"{own / formula:.3f}"
        table.add_row(way, format_bytes(own), format_bytes(formula), ratio, format_bytes(own * len(known)), what)
    console.print(table)


def measured_volume(spec: RunSpec, log: ContributionLog, record: RoundRecord) -> Volume | None:
    """Return the volume of the contributions that a record names; None if it names none.

    Raises FileNotFoundError if a contribution is gone, DamagedFile or MalformedContribution if one is invalid.
    """
    volume, read = RoundVolume(), log.blobs_of(record)
    replicas, compression = [entry.replica for entry in record.contributions], spec.config.outer.compression
    for block, shapes in shapes_in(record, spec.parameter_shapes).items():
        received = []
        for replica in replicas:
            data, address = read(replica, block), BlobAddress(spec.run, record.round, replica, block)
            volume.contribute(len(data))
            received.append(ReceivedBlob(data, address, shapes, compression))
        for name, shape in shapes.items():
            volume.add(shape, [one.tensor(name) for one in received])
    return volume.volume()
