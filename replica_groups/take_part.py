"""One member's part in a run, from joining it to its last round: the same in a process, on ranks and in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.shaping import MonotonicClock
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import exchange_link_name, stage_link_name
from hetero_pp.model import EMBEDDING
from hetero_pp.outer.exchange_service import ExchangeService
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.round_optimizer import round_optimizer
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.snapshot import BASIS
from hetero_pp.topology import DatacenterReplica
from replica_groups.build_member import Start, build_member, device_of
from replica_groups.exchange.collective import CollectiveExchange
from replica_groups.exchange.reporter import Reporter
from replica_groups.exchange.restart import join_run
from replica_groups.exchange.shaped import ShapedExchange
from replica_groups.gate import Gate
from replica_groups.outer_round import OuterRound
from replica_groups.ranks import ALONE, Ranks
from replica_groups.round_length import StepsOf, round_length
from replica_groups.saved_states import SavedStates
from replica_groups.steps_taken import StepsTaken
from replica_groups.training_loop import LedgerOf, TrainingLoop


class Connections(Protocol):
    """How a member reaches the rest of its run."""

    @property
    def exchange(self) -> ExchangeService:
        """Unshaped; where several ranks are one member, only the first one's is used."""

    @property
    def lines(self) -> Lines:
        """That all links of the member share."""

    def listen(self) -> str:
        """Be ready for the stage before; the address at which it finds this member (empty: it needs none)."""

    def open(self, epoch: int = 0, downstream: str | None = None) -> LinkEnds:
        """The links to the stages beside this one, of this epoch of its group; called once this member has joined.

        May be called again for a newer epoch: the ends of older ones are then aborted, and the ledgers of the new ones
        go on counting. `downstream` is where the stage after listens; without, the exchange is asked. Raises LinkClosed
        if the epoch is over, LinkTimeout if a neighbour does not come.
        """

    def give_up(self, before: int, cause: str) -> None:
        """Links of epochs before this one are over: who uses one, or waits in `open`, gets LinkClosed. From any thread.

        `open` raises for such an epoch from then on.
        """


def take_part(
    spec: RunSpec,
    member: MemberSpec,
    connections: Connections,
    folder: RunFolder,
    ranks: Ranks = ALONE,
    gate: Gate | None = None,
    steps_of: StepsOf | None = None,
) -> None:
    """Train all rounds that are left as one member of a run, or as one of the ranks that are a member together.

    The exchange says after which round the run goes on, if it does not begin. Whoever made the connections closes
    them, or aborts them if this raises HeteroPPError: the run has failed, here or elsewhere. With a gate each round
    begins when that is open. With `steps_of` rounds that are time are as long as that says; see round_length.
    """
    config = spec.config
    link = spec.links[exchange_link_name(member.name)]
    shaped = ShapedExchange(connections.exchange, link, config.seed, connections.lines)
    exchange: ExchangeService = (
        shaped if ranks.world == 1 else CollectiveExchange(shaped if ranks.is_first else None, ranks)
    )
    run = exchange.agree(member.name, spec.agreed)
    states = SavedStates(folder.state(member.name), run, config.snapshots.every, ranks)
    last_round = join_run(exchange, member.name, connections.listen(), states)
    spec = spec.with_changes(exchange.changes())
    ends = connections.open()
    start = _fetch_start(spec, member, exchange)
    if isinstance(member.replica, DatacenterReplica) and ranks.world == 1:
        ranks = Ranks(device=device_of(member.replica))
    trainer = build_member(spec, member, start, ends, folder.cache, ranks)
    outer = OuterRound(
        run,
        member.name,
        member.replica.name,
        trainer.parameters,
        start.parameters,
        exchange,
        config.outer,
        optimizer=round_optimizer(spec, start.basis),
        ranks=ranks,
    )
    del start  # a whole model
    reporter = Reporter(exchange, member.name)
    ledgers = list(_ledgers(member, shaped, ends))
    states = replace(states, every=spec.latest.snapshots.every)
    length = round_length(spec, member, MonotonicClock(), ranks, steps_of)
    steps = StepsTaken(config.inner.steps)
    loop = TrainingLoop(trainer, member.replica.name, outer, reporter, ledgers, states, length, steps, gate=gate)
    try:
        loop.run(range(last_round + 1, spec.latest.outer.rounds + 1), spec)
    finally:
        reporter.close()


def _fetch_start(spec: RunSpec, member: MemberSpec, exchange: ExchangeService) -> Start:
    """From the snapshot that the run begins or goes on with."""
    names = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    basis = [] if spec.largest_rank is None else [BASIS]
    tensors = exchange.snapshot([*names, *basis])
    return Start({name: tensors[name] for name in names}, tensors.get(BASIS))


def _ledgers(member: MemberSpec, shaped: ShapedExchange, ends: LinkEnds) -> Iterator[LedgerOf]:
    """Each direction of a stage link is counted by the end that sends it; both of the exchange's by the member."""
    link = exchange_link_name(member.name)
    yield link, "forward", shaped.forward
    yield link, "backward", shaped.backward
    if member.stage is not None and ends.downstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index), "forward", ends.downstream.ledger
    if member.stage is not None and ends.upstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index - 1), "backward", ends.upstream.ledger
