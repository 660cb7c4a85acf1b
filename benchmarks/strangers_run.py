"""A live run under attack: two honest replicas, and the slots of two more, which the attacker holds.

Its members and its exchange are the processes of a launch. They are started with a known secret, as a launch over
several hosts has one, so that attacks can use a member's own credentials. All connections use TLS, as between hosts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from fault_injection.wire import Wire
from processes import writers_to

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER, RELAYED, stage_link_name
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.program.launch.command import begin_folder
from hetero_pp.program.launch.inputs import prepare
from hetero_pp.program.launch.supervisor import Supervisor, Watcher, tell_died
from hetero_pp.rpc.connections import reports_of
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, Identity, Secret, SecretKeys, as_text, digest_of, make_ticket, new_key
from replica_groups.exchange.memberships import Memberships

PAGES = Path(__file__).parents[1] / "docs"
SECRET_OF_THE_RUN = Secret("of this benchmark only")
GUEST, HONEST = "guest", "dc"
ENDS = ("den.0", "den.1")
"""Members of a group that never trains. The attacker holds their link, and is invited to their slots."""
GUESTS = (GUEST, *ENDS)
GUEST_REPLICAS = (GUEST, "den")
HOUR = 3600.0
CUT_SECONDS = 0.2
MOST_SECONDS_A_ROUND = 90.0
HELD_ROUNDS = 2
"""Rounds at the end of a run that wait until the run may end. They need `HONEST`, unless an attacker contributes."""

YAML = """\
name: strangers
seed: 1
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_sequences: 2, repeat: true}
inner: {steps: 4, learning_rate: 6e-3, final_learning_rate_share: 1}
outer: {rounds: 100, weights: tokens, compression: {density: 1/32}}
checkpoints: {every: 100}
exchange:
  quorum: 0.5
  grace: {factor: 3, least: 0.2 s, most: 2 s}
  lease: {factor: 5, least: 10 min, most: 10 min}
  hang: {least: 10 min, most: 10 min}
lines: {dsl: {bandwidth: 1 Gbit/s, latency: LATENCY}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 2}
  - {name: home, kind: participants, batch_size: 2, micro_batches: 2, boundary: {rank: 1/4},
     stages: [{layers: 1, line: dsl}, {layers: 1, line: dsl, listen: "LISTEN"}]}
  - {name: guest, kind: datacenter, batch_size: 2}
  - {name: den, kind: participants, stages: {count: 2}, batch_size: 2, micro_batches: 2, boundary: {rank: 1/4}}
"""
"""Both honest replicas make a quorum, so that the fate of the others changes no bits.

The learning rate is constant, so that a round has the same bits whichever round is the last. Latency takes most of the
time, so that processors are left to attacks.
"""

LATENCY = "20 ms"
UPSTREAM, DOWNSTREAM = "home.0", "home.1"
LINK, OWN_LINK = stage_link_name("home", 0), stage_link_name("den", 0)


class TooFewRoundsError(Exception):
    """The run has too few rounds left for what is measured."""


class LiveRun:
    """One run from its start to its end, and its reports so far. Use it as a context manager."""

    def __init__(self, folder: Path, name: str, rounds: int, latency: str = LATENCY, relayed: bool = False) -> None:
        """Prepare the run.

        If `relayed`, stages reach each other through the exchange, and one of them can be cut off.
        """
        listen = RELAYED if relayed else "127.0.0.1:0"
        path, corpus = folder / f"{name}.yaml", folder / "text.txt"
        if not corpus.exists():  # equal for all compared runs, even if a page changes
            corpus.write_text("\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))
        path.write_text(YAML.replace("LATENCY", latency).replace("CORPUS", str(corpus)).replace("LISTEN", listen))
        runs = folder / "runs"  # shared by all runs, so that the corpus is encoded once
        file = ConfigFile(path, [f"name={name}", f"outer.rounds={rounds}"])
        self.spec, self.rounds = prepare(file, runs).spec, rounds
        self._folder = begin_folder(self.spec, runs)
        self.closed: dict[int, float] = {}
        """Time at which each round closed, by the exchange's clock."""
        self.hashes: dict[int, dict[str, bytes]] = defaultdict(dict)
        """Digest of the parameters after each round, by round and replica."""
        self.refusals: Counter[str] = Counter()
        """Number of refusals by kind, as far as they were reported."""
        self.happened: Counter[str] = Counter()
        """Number of times that a member's slot was vacated, or that a replica was late, scaled down or left out."""
        self.addresses: dict[str, str] = {}
        self.largest_share = 0.0
        """Largest share of the weights of a round that attackers had."""
        self.liars_folder = RunFolder(folder / "runs" / f"liars-{name}")
        self.is_over = False
        """Whether the run has ended, successfully or not."""
        self.failure: str | None = None
        self.address = ""
        self._is_paused = False
        self._may_end = False
        self._relayed = relayed
        self._wire: Wire | None = None
        self._changed = threading.Condition()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live run", daemon=True)

    def __enter__(self) -> LiveRun:
        self._thread.start()
        self._listens.wait()
        if self.failure is None:
            self._let_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._let_end()
        self._thread.join(MOST_SECONDS_A_ROUND)

    # ---- members ----

    def credentials(self, name: str) -> Credentials:
        """Return the credentials of a process of the run."""
        return SECRET_OF_THE_RUN.credentials(name, encrypted=True)

    def expired(self, name: str) -> Credentials:
        """Return credentials with an expired certificate."""
        key, authority = new_key(), SECRET_OF_THE_RUN.authority
        certificate = authority.sign(key.public_key(), name, 0, time.time() - 1.0)
        return Credentials(name, identity=Identity(certificate, as_text(key), authority.certificate))

    def tickets(self) -> Mapping[str, Credentials]:
        """Return credentials by state, as in `Target.tickets`: tickets, and those of a former holder of a slot."""
        authority, until, (former, invited) = SECRET_OF_THE_RUN.authority, time.time() + HOUR, ENDS
        key, found = new_key(), dict[str, str]()
        with closing(Memberships(self._folder.memberships)) as memberships:
            for slot in ENDS:
                if memberships.held_by(slot) is not None:
                    memberships.revoke(slot)
            first = memberships.enrol(memberships.invite(former, HOUR), digest_of(key.public_key()), [], HOUR)
            memberships.end(former, first.number, "its slot was returned")
            found["used"] = memberships.invite(former, HOUR)
            memberships.enrol(found["used"], b"another key", [], HOUR)
            found["open"] = memberships.invite(None, HOUR)
            found["invited"] = memberships.invite(invited, HOUR)
        found["unknown"] = "0123456789abcdef"
        made = {what: make_ticket("", "", authority, ticket, until).identity for what, ticket in found.items()}
        signed = authority.sign(key.public_key(), former, first.number, until)
        made["former"] = Identity(signed, as_text(key), authority.certificate)
        return {what: Credentials(identity.shown.name, identity=identity) for what, identity in made.items()}

    def _run(self) -> None:
        honest = [member for member in self.spec.members if member not in GUESTS]
        try:
            keys = SecretKeys(SECRET_OF_THE_RUN, encrypted=True)
            with Supervisor(self.spec, self._folder, self._on_report, LAUNCHER, keys) as supervisor:
                supervisor.start([EXCHANGE, *honest])
                self.address = supervisor.open_exchange()
                told = partial(reports_of, self.address, supervisor.credentials, supervisor.on_silence)
                watcher = Watcher(told, supervisor.on_report)
                if self._relayed:
                    self._wire = Wire(self.address)
                    supervisor.join_exchange([UPSTREAM], self._wire.address)
                    honest.remove(UPSTREAM)
                supervisor.join_exchange(honest, self.address)
                self._listens.set()
                supervisor.wait()
                watcher.join()
        except Exception as error:  # noqa: BLE001 (told with the end of the run)
            self.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()
            self._listens.set()

    def _let_begin(self) -> None:
        """Let the guests join and leave, because the run begins only once all members have joined."""
        for guest in GUESTS:
            with closing(
                ExchangeClient(self.address, self.credentials(guest), self.spec.run, timeout=MOST_SECONDS_A_ROUND)
            ) as client:
                client.join(guest, "")
        self.end_guests()

    def end_guests(self, names: Sequence[str] = GUESTS) -> None:
        """Report that the guests have ended, as the process that started them does."""
        for name in names:
            tell_died(self.address, self.credentials(LAUNCHER), name, "it has ended", None)

    def cut(self) -> None:
        """Cut the line of the stage before the link, which the link goes through, for a moment."""
        assert self._wire is not None
        self._wire.cut()
        time.sleep(CUT_SECONDS)
        self._wire.mend()

    # ---- what it does ----

    def wait_for_round(self, round_: int) -> bool:
        """Wait until a round closes. Return False if the run ends or stalls before.

        Raises TooFewRoundsError if the round can close only once the run may end.
        """
        with self._changed:
            if round_ > self.rounds - HELD_ROUNDS and not self._may_end:
                raise TooFewRoundsError(f"round {round_} of {self.rounds} would close near the end")
            while round_ not in self.closed and not self.is_over:
                if not self._changed.wait(MOST_SECONDS_A_ROUND):
                    return False  # no report of any kind
            return round_ in self.closed

    def wait_rounds(self, count: int) -> list[float]:
        """Return the seconds of each of the next rounds; of fewer rounds if the run ends."""
        first = max(self.closed, default=0)
        self.wait_for_round(first + count)
        after = range(first + 1, first + count + 1)
        times = [(self.closed.get(round_ - 1), self.closed.get(round_)) for round_ in after]
        return [until - since for since, until in times if since is not None and until is not None]

    def wait_until_over(self) -> None:
        """Let the run end, and wait for its last round and its end."""
        self._let_end()
        self.wait_for_round(self.rounds)
        self._thread.join(MOST_SECONDS_A_ROUND)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no round close while the block runs."""
        self._pause(True)
        try:
            yield
        finally:
            self._pause(False)

    def _pause(self, is_paused: bool) -> None:
        with self._changed:
            self._is_paused = is_paused
            self._signal_honest(signal.SIGSTOP if self._must_wait() else signal.SIGCONT)

    def _let_end(self) -> None:
        with self._changed:
            self._may_end = True
            self._signal_honest(signal.SIGCONT)

    def _must_wait(self) -> bool:
        """Return whether the run is paused, or waits near its end until it may end.

        So attacks and measurements meet a live exchange however slow the machine is.
        """
        is_near_end = len(self.closed) >= self.rounds - HELD_ROUNDS
        return not self._may_end and (self._is_paused or is_near_end)

    def _signal_honest(self, number: signal.Signals) -> None:
        """Stop or continue one honest replica. The quorum needs it while no attacker contributes."""
        for pid, member in writers_to(self._folder.path / "logs"):
            if member == HONEST:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, number)

    def differs_from(self, other: LiveRun) -> list[int]:
        """Return rounds after which an honest replica holds other bits than in another run, which must be as long."""
        return [one for one in range(1, self.rounds + 1) if self._honest(one) != other._honest(one)]

    def _honest(self, round_: int) -> dict[str, bytes]:
        return {replica: value for replica, value in self.hashes[round_].items() if replica in ("dc", "home")}

    def size(self) -> tuple[int, int, int]:
        """Return the exchange's process id, bytes of memory, and number of threads; zeros if there is none."""
        for pid, member in writers_to(self._folder.path / "logs"):
            if member == EXCHANGE:
                process = psutil.Process(pid)
                return pid, process.memory_info().rss, process.num_threads()
        return 0, 0, 0

    def said(self) -> int:
        """Return the bytes that the exchange has printed. It prints a traceback for each unexpected error."""
        path = self._folder.output(EXCHANGE)
        return path.stat().st_size if path.exists() else 0

    def _on_report(self, report: Report) -> None:
        with self._changed:
            match report.WhichOneof("event"):
                case "round_closed":
                    self.closed[report.round_closed.round] = report.time
                    if self._must_wait():
                        self._signal_honest(signal.SIGSTOP)
                    self._note_shares(report.round_closed)
                    for replica in report.round_closed.late:
                        self.happened[f"{replica} was late"] += 1
                case "round_verified":
                    verified = report.round_verified
                    self.hashes[verified.round][verified.replica] = verified.parameters_sha256
                case "refusal":
                    self.refusals[report.refusal.kind] += report.refusal.count or 1
                case "joined":
                    self.addresses[report.member] = report.joined.address
                case "membership_event":
                    slot = report.membership_event.slot or report.membership_event.replica
                    self.happened[f"{slot}: {report.membership_event.cause or report.membership_event.what}"] += 1
            self._changed.notify_all()

    def _note_shares(self, record: RoundRecord) -> None:
        total = sum(one.weight for one in record.contributions)
        own = sum(one.weight for one in record.contributions if one.replica in GUEST_REPLICAS)
        self.largest_share = max(self.largest_share, own / total if total > 0 else 1.0)
        for one in record.contributions:
            if one.scale:
                self.happened[f"{one.replica} was scaled down"] += 1
        for replica in record.left_out:
            self.happened[f"{replica} was left out"] += 1

    def differs_within(self) -> list[int]:
        """Return the rounds after which the honest replicas do not hold the same bits."""
        return [one for one in range(1, self.rounds + 1) if len(set(self._honest(one).values())) != 1]

    def harm(self) -> dict[str, int]:
        """Return the events that happened to honest members."""
        return {what: count for what, count in self.happened.items() if not what.startswith((GUEST, "den"))}


class Reference:
    """Runs without attack, over links without latency. They have the same bits, and take less time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: LiveRun | None = None

    def of(self, rounds: int) -> LiveRun:
        """Return a run of at least `rounds` rounds. A round has the same bits in all of these runs."""
        if self._run is None or self._run.rounds < rounds:
            with LiveRun(self._folder, f"honest-{rounds}", rounds, latency="0 ms") as self._run:
                self._run.wait_until_over()
        return self._run
