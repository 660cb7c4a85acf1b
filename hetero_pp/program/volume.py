"""`hetero-pp volume`: the bytes that a run's contributions take, or would take, with each collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError, DamagedFile
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_bytes, format_count
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.volume import RoundVolume, Volume
from hetero_pp.program.open_run import open_run
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob
from hetero_pp.simulator.traffic import expected_volume
from replica_groups.exchange.log import ContributionLog

WAYS = {
    "gather": "to an exchange, a store, or a parameter server",
    "ring_all_gather": "passed on as they are",
    "ring_all_reduce": "sums of dense contributions",
    "sparse_ring": "sums of sparse contributions, which grow",
}


@dataclass(frozen=True)
class RoundSent:
    """Volumes of one round of the log: measured, and by formula."""

    round: int
    replicas: Sequence[str]
    measured: Volume
    by_formula: Volume


def print_volume(runs: Path, run: str, json_path: Path | None) -> None:
    """Print the mean bytes that one replica sends per round with each collective, measured and by formula.

    Rounds count only if the log still has their contributions. Raises ConfigError if there is no such run or no such
    round, HeteroPPError if a file is damaged.
    """
    spec, log = open_run(runs, run)
    rounds = sorted(log.records())
    found = [one for round_ in rounds if (one := _round(spec, log, round_)) is not None]
    if not found:
        told = "found no complete round, expected at least one with all of its contributions"
        raise ConfigError((), f"{log.store.url()}: {told}")
    write_json(json_path, {"run": spec.config.name, "rounds": [asdict(one) for one in found]})
    _print(spec, found, len(rounds))


def _round(spec: RunSpec, log: ContributionLog, round_: int) -> RoundSent | None:
    """Return the volumes of a round; None if no contribution of it is left.

    The round counted none, or `store.history: recent` removed them. Raises DamagedFile if a contribution is lost.
    """
    record = log.read_record(round_)
    try:
        measured = measured_volume(spec, log, record)
    except FileNotFoundError as error:
        if spec.latest.store.history == "recent":
            return None
        raise DamagedFile(f"{error.filename or error}: a contribution to round {round_} is missing") from None
    replicas = [entry.replica for entry in record.contributions]
    return None if measured is None else RoundSent(round_, replicas, measured, expected_volume(spec, len(replicas)))


def measured_volume(spec: RunSpec, log: ContributionLog, record: RoundRecord) -> Volume | None:
    """Return the volume of the contributions that a record names; None if it names none.

    Raises FileNotFoundError if a contribution is gone, DamagedFile or MalformedContribution if one is invalid.
    """
    volume, read = RoundVolume(), log.blobs_of(record)
    replicas, compression = [entry.replica for entry in record.contributions], spec.config.outer.compression
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        blobs = {replica: read(replica, block) for replica in replicas}
        received = []
        for replica, data in blobs.items():
            volume.contribute(len(data))
            received.append(
                ReceivedBlob(data, BlobAddress(spec.run, record.round, replica, block), shapes, compression)
            )
        for name, shape in shapes.items():
            if received:
                volume.add(shape, [one.tensor(name) for one in received])
    return volume.volume()


def _print(spec: RunSpec, found: Sequence[RoundSent], rounds: int) -> None:
    console = standard_output()
    counts = sorted({len(one.replicas) for one in found})
    replicas = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    of_all = "" if len(found) == rounds else f" of {rounds} (other contributions were removed)"
    counted = format_count(len(found), "round")
    say(console, f"{spec.config.name}: bytes sent by one of {replicas}, mean over {counted}{of_all}")
    table = PlainTable(["exchanged by"], ["a round", "by formula", "ratio", "all rounds"], ["what is sent"])
    for way, what in WAYS.items():
        pairs = [(asdict(one.measured)[way], asdict(one.by_formula)[way]) for one in found]
        known = [(own, formula) for own, formula in pairs if own is not None and formula is not None]
        if not known:
            table.add_row(way, "–", "–", "–", "–", what)
            continue
        own, formula = (fmean(side) for side in zip(*known, strict=True))
        ratio = "–" if formula == 0 else f"{own / formula:.3f}"
        table.add_row(way, format_bytes(own), format_bytes(formula), ratio, format_bytes(own * len(known)), what)
    console.print(table)
