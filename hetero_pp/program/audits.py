"""`hetero-pp audit`: a validator in a process of its own, which judges a run, and the scores of its replicas."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.lines import EXCHANGE, VALIDATOR
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.device import resolved
from hetero_pp.core.errors import (
    ConfigError,
    DamagedFile,
    ExchangeLost,
    HeteroPPError,
    Refused,
    RunFailed,
    RunOver,
    StoreError,
)
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_count
from hetero_pp.data.sources import Source, open_source, tokens_digest
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Score
from hetero_pp.program.launch.hosts import dialled_here
from hetero_pp.program.report.output import announce, standard_output, tell
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.program.run_log import open_run
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Credentials, Identity, Secret, is_validators
from hetero_pp.store.opening import folder_of
from replica_groups.audit.validator import Validator, checks_of
from replica_groups.exchange.audits import KeptScores, newest_scores
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.replay import newest_sound
from replica_groups.exchange.text import Text

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_QUESTIONS = 10.0  # interval at which a validator without a new round asks whether the run goes on
SECONDS_FOR_AN_EXCHANGE = 30.0  # time after which judgements are given up if the exchange does not answer
_LOOKED_BACK = 256  # rounds that are read to find a replica's last contribution

T = TypeVar("T")


@dataclass(frozen=True)
class Access:
    """How a validator reaches the exchange, and in which name: each name has one vote."""

    address: str
    credentials: Credentials

    @property
    def name(self) -> str:
        return self.credentials.name.removeprefix(VALIDATOR)

    @classmethod
    def by_secret(cls, name: str, address: str, secret: Secret, encrypted: bool) -> Access:
        return cls(address, secret.credentials(VALIDATOR + name, encrypted=encrypted))

    def to_json(self) -> str:
        """Return what a validator needs on another host, as one line."""
        own = self.credentials.identity
        assert own is not None, "only encrypted runs have validators on other hosts"
        pem = {"certificate": own.certificate, "key": own.key, "authority": own.authority}
        return json.dumps({"exchange": self.address, **pem})

    @classmethod
    def read(cls, path: Path) -> Access:
        """Return what `to_json` wrote to a file. Raises ConfigError for another file."""
        try:
            told = read_json_object(path)
            exchange, *pem = (str(told[key]) for key in ("exchange", "certificate", "key", "authority"))
            name = (identity := Identity(*pem)).shown.name
        except (OSError, ValueError, KeyError) as error:
            found = f"--pass {path}: cannot be read ({error})"
            raise ConfigError((), f"{found}, expected what `hetero-pp invite RUN --validator NAME` printed") from None
        return cls(exchange, Credentials(name, identity=identity))


class RunChanged(HeteroPPError):
    """The run has resumed from an earlier round, or with other settings."""


class FollowedRun:
    """A run elsewhere, by its log and its exchange. Implements ValidatedRun."""

    def __init__(self, spec: RunSpec, log: ContributionLog, access: Access, say: Callable[[str], None]):
        self.log = log
        self._say, self._credentials = say, access.credentials
        self.client = ExchangeClient(access.address, access.credentials, spec.run)
        self.spec = spec  # the run, with the changes that its exchange knows
        with suppress(ExchangeLost):
            self.spec = spec.with_changes(self.client.changes())
        self._newest: pb.RoundRecord | None = None
        self._last = 0
        self._is_gone = False  # whether the exchange did not answer for a while

    def record(self, round_: int) -> pb.RoundRecord:
        """Return a round's record as soon as the log has it.

        Raises RunChanged if honest members may have computed something else than this validator would: the run has
        resumed from before the record that came before, or with other settings. Raises RunFailed if the run has failed.
        """
        before, self._newest = self._newest, (record := self.wait_for(lambda: self.log.read_record(round_)))
        if before is not None:
            try:
                sha256 = self.retry(lambda: self.log.read_record(before.round)).sha256
            except FileNotFoundError:
                sha256 = b""
            if sha256 != before.sha256:
                raise RunChanged(f"the run has resumed from before round {before.round}")
        with suppress(ExchangeLost, RunFailed, RunOver):
            if self.client.changes().mark != self.spec.changes.mark:
                raise RunChanged("the run has resumed with other settings")
        return record

    def last_round(self) -> int:
        self._last = max(self._last, self.retry(self.log.last_record))
        return self._last

    def wait_for(self, find: Callable[[], T]) -> T:
        asked = time.monotonic()
        while True:
            try:
                return self.retry(find)
            except FileNotFoundError:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if time.monotonic() - asked > SECONDS_BETWEEN_QUESTIONS:
                asked = time.monotonic()
                try:
                    self.client.last_round()
                except ExchangeLost as error:  # it may come back
                    self._say(f"{error}; waiting for it")

    def retry(self, do: Callable[[], T]) -> T:
        while True:
            try:
                return do()
            except StoreError as error:
                self._say(f"{error}; retrying")
                time.sleep(SECONDS_BETWEEN_QUESTIONS)

    def take(self, judgements: Sequence[pb.Judgement]) -> None:
        """Send judgements. They are reported and dropped if the exchange refuses them or does not answer in time."""
        request = pb.JudgeRequest(judgements=judgements)
        until, round_ = time.monotonic() + SECONDS_FOR_AN_EXCHANGE, judgements[0].round
        while True:
            try:
                self.client.call(request, Caller(self._credentials.name))
                self._is_gone = False
                return
            except Refused as error:
                self._say(f"round {round_}: the exchange refused the judgements: {error}")
                return
            except ExchangeLost as error:
                if self._is_gone or time.monotonic() > until:
                    self._is_gone = True
                    self._say(f"round {round_}: the judgements are lost: {error}")
                    return
                time.sleep(SECONDS_BETWEEN_LOOKS)


def validate(runs: Path, run: str, pass_: Path | None, device: str, name: str | None) -> None:
    """Follow a run until its last round, and judge its rounds. `run`: its name, its folder or the URL of its log.

    `pass_`: file of a validator on another host than the exchange's. Raises ConfigError for a run without audits, and
    if this host cannot reach the exchange.
    """
    folder = None if folder_of(run) is None else run_folder(runs, run)

    def say(line: str) -> None:
        announce(f"{title}: {line}")

    def on_round(round_: int, count: int) -> None:
        say(f"round {round_}: {format_count(count, 'judgement') if count else 'not judged'}")

    while True:
        spec, log = open_run(runs, run)
        audit, title = spec.config.audit, spec.config.name
        if not audit.needs_validators:
            expected = "expected `audit.gauntlet` or `audit.recompute`"
            raise ConfigError((), f"{title}: found a run without audits, {expected}")
        here = folder or RunFolder(runs.absolute() / title)
        access = access_to(here, pass_, name)
        followed = FollowedRun(spec, log, access, say)
        spec = followed.spec
        source = open_source(spec.config.data, here.cache)
        require_same_text(here, source)
        torch.set_num_threads(spec.config.threads)
        checks = checks_of(spec, followed, source, resolved(device))
        say(f"{access.name} judges its rounds for the exchange at {access.address}")
        try:
            while not followed.retry(log.checkpoints):
                time.sleep(SECONDS_BETWEEN_LOOKS)
            newest = newest_sound(log, followed.last_round(), [])
            say(f"following the run after round {newest.round}")
            Validator(spec, followed, checks, newest).run(on_round)
            say(f"all {spec.latest.rounds} rounds are closed")
            return
        except RunChanged as error:
            say(f"{error}; it is followed anew")
        except (RunFailed, RunOver) as error:
            say(f"the run has ended: {error}")
            return
        finally:
            followed.client.close()


def require_same_text(folder: RunFolder, source: Source) -> None:
    """Raise ConfigError if this host reads another text than the run: every honest member would be blamed."""
    text, tokens = Text(folder.text, lambda member: False, lambda: True), tokens_digest(source)
    if tokens and (complaint := text.complaint("validator", tokens)):
        raise ConfigError(("data", "corpus"), complaint)


def access_to(folder: RunFolder, pass_: Path | None, name: str | None) -> Access:
    """Return how to reach the exchange: as a pass says, or else as this host's exchange wrote it into the folder."""
    if pass_ is not None:
        if name is not None:
            raise ConfigError((), f"--name: found `{name}` with --pass, which has a name")
        return Access.read(pass_)
    if not folder.validators.is_file():
        here = "its exchange writes the file if the YAML has `audit: {by: validators}`"
        found = f"found no address of an exchange on this host; {here}"
        raise ConfigError((), f"{folder.validators}: {found}; on another host, use --pass")
    own = require_name(name or re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node()).strip("-_0123456789")[:40] or "here")
    try:
        told = read_json_object(folder.validators)
        return Access.by_secret(own, dialled_here(str(told["exchange"])), Secret(told["secret"]), told["encrypted"])
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ConfigError((), f"{folder.validators}: cannot be read ({error})") from None


def require_name(name: str) -> str:
    """Return the name of a validator. Raises ConfigError for one that it cannot have."""
    if not is_validators(VALIDATOR + name):
        expected = f"expected up to 40 letters, digits, `-` and `_`, beginning with a letter, and not `{EXCHANGE}`"
        raise ConfigError((), f"found a validator `{name}`, {expected}")
    return name


# ---- scores ----


def print_scores(runs: Path, run: str, json_path: Path | None) -> None:
    """Print the scores of a run's replicas, as the newest judged round in its log has them, the best first.

    Raises ConfigError if there is no such run, DamagedFile if its scores were altered.
    """
    spec, log = open_run(runs, run)
    kept, name, console = newest_scores(log.store), spec.config.name, standard_output()
    found: dict[str, Any] = {"run": name, "round": None if kept is None else kept.round, "replicas": []}
    if kept is None and spec.config.audit.scores is None:
        how = "`audit: {gauntlet: {}}` in the YAML turns scores on"
        tell(console, f"{name}: its contributions are not scored; {how}")
    elif kept is None:
        tell(console, f"{name}: no round has been judged yet; {log.last_record()} rounds are closed")
    else:
        numbers = ["rating", "average", "synchronisation", "uptime", "reliability", "final", "share"]
        table = PlainTable(["replica"], [*numbers, "evaluations"], ["excluded"])
        for one in sorted(kept.scores.scores, key=lambda one: (-one.final, one.replica)):
            shown = [f"{getattr(one, number):.3f}" for number in numbers]
            table.add_row(one.replica, *shown, f"{one.evaluations}", one.excluded or "–")
        console.print(table)
        tell(console, f"{name}: scores after round {kept.round}")
        for line in _absent(log, kept):
            tell(console, f"{name}: {line}")
        for one in kept.scores.scores:
            excluded = kept.excluded.get(one.replica) if one.excluded else None
            told = {field.name: getattr(one, field.name) for field in Score.DESCRIPTOR.fields}
            told |= {"excluded": one.excluded or None, "excluded_until": None if excluded is None else excluded.until}
            found["replicas"].append(told)
    write_json(json_path, found)


def _absent(log: ContributionLog, kept: KeptScores) -> Iterator[str]:
    """Yield a line for each replica that took no part in the last round: its score stays as it was."""
    last = log.last_record()
    missing = {one.replica for one in kept.scores.scores if not one.excluded}
    found: dict[str, int] = {}
    for round_ in range(last, max(0, last - _LOOKED_BACK), -1):
        if missing <= found.keys():
            break
        with suppress(DamagedFile, FileNotFoundError):
            record = log.read_record(round_)
            for name in [*(one.replica for one in record.contributions), *record.left_out]:
                found.setdefault(name, round_)
    for name in sorted(missing):
        if found.get(name) != last:
            when = f"its last contribution is in round {found[name]}" if name in found else "it has not contributed"
            yield f"{name} took no part in round {last}; {when}, and its score stays as it was"
