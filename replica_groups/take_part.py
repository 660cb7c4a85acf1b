"""One member's part in a run, from joining it to its last round: the same in a process, on ranks and in a thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from hetero_pp.data.sources import Source, open_source
from hetero_pp.errors import Stopped
from hetero_pp.faults import NO_FAULTS, Faults
from hetero_pp.files import keep_trying
from hetero_pp.link.ends import NOT_KNOWN, Holders, LinkEnds
from hetero_pp.link.shaping import MonotonicClock
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import exchange_link_name, stage_link_name
from hetero_pp.model import EMBEDDING
from hetero_pp.outer.exchange_service import Assignment, ExchangeService
from hetero_pp.run.batches import text_digest
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.round_optimizer import round_optimizer
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.snapshot import BASIS, MOMENTUM
from hetero_pp.topology import DatacenterReplica
from replica_groups.build_member import Start, build_member, device_of
from replica_groups.exchange.carried import CarriedExchange
from replica_groups.exchange.collective import CollectiveExchange
from replica_groups.exchange.reporter import Reporter
from replica_groups.exchange.restart import states_to_go_on_from
from replica_groups.exchange.shaped import ShapedExchange
from replica_groups.gate import Gate
from replica_groups.held_back import HeldBack
from replica_groups.outer_round import Carrier, OuterRound
from replica_groups.ranks import ALONE, Ranks
from replica_groups.round_length import StepsOf, round_length
from replica_groups.saved_states import SavedStates
from replica_groups.seat import LedgerOf, Seat
from replica_groups.state_copies import StateCopies
from replica_groups.steps_taken import StepsTaken
from replica_groups.stopping import NEVER_STOPPED, Stopping
from replica_groups.training_loop import TrainingLoop, TrainingMember, momentum_of


class Connections(Protocol):
    """How a member reaches the rest of its run."""

    @property
    def exchange(self) -> ExchangeService:
        """Unshaped; where several ranks are one member, only the first one's is used."""

    @property
    def lines(self) -> Lines:
        """That all links of the member share."""

    def listen(self) -> str:
        """Be ready for the stages beside this one; the address at which they find it (empty: at none)."""

    def open(self, epoch: int, upstream: str, downstream: str, holders: Holders = NOT_KNOWN) -> LinkEnds:
        """The links to the stages beside this one, of this epoch of its group; called once this member has joined.

        May be called again for a newer epoch: the ends of older ones are then aborted, and the ledgers of the new ones
        go on counting. `upstream` and `downstream` are where the stages before and after are to be dialled (empty: they
        dial, or there is none). A neighbour with another number than in `holders` is refused.

        Raises LinkClosed if the epoch is over, LinkTimeout if a neighbour does not come.
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
    faults: Faults = NO_FAULTS,
    stopping: Stopping = NEVER_STOPPED,
) -> None:
    """Train all rounds that are left as one member of a run, or as one of the ranks that are a member together.

    The exchange says after which round the run goes on, if it does not begin. Whoever made the connections closes
    them, or aborts them if this raises HeteroPPError: the run has failed, here or elsewhere. With a gate each round
    begins when that is open. With `steps_of` rounds that are time are as long as that says; see round_length. `faults`
    are what the member has to survive. `stopping` asks it to save its state and to leave.
    """

    def say(line: str) -> None:
        print(f"{member.name}: {line}", file=sys.stderr, flush=True)

    config = spec.config
    link = spec.links[exchange_link_name(member.name)]
    kind = CarriedExchange if config.outer.overlap else ShapedExchange
    shaped = kind(connections.exchange, link, config.seed, connections.lines, stopping)
    exchange: ExchangeService = (
        shaped if ranks.world == 1 else CollectiveExchange(shaped if ranks.is_first else None, ranks)
    )
    source = keep_trying(lambda: open_source(config.data, folder.cache), say) if member.reads_data else None
    run = exchange.agree(member.name, spec.agreed, text_digest(spec, source))
    copies = _copies(config, folder, member) if ranks.is_first else None
    states = SavedStates(folder.state(member.name), run, config.states_every, ranks, copies)
    available, address = states.find(), connections.listen()
    seat = Seat(exchange, member.name, address, available, _Links(member, connections, shaped))
    with seat.taken():
        saved = states_to_go_on_from(exchange, member.name, member.replica.name, states, available)
        spec = spec.with_changes(exchange.changes())
        if isinstance(member.replica, DatacenterReplica) and ranks.world == 1:
            ranks = Ranks(device=device_of(member.replica))
        carrier = shaped if isinstance(shaped, CarriedExchange) and ranks.is_first else None
        trainer, outer, holds = _build(spec, run, member, exchange, source, ranks, faults, carrier)
        states = replace(states, every=spec.latest.states_every)
        length = round_length(spec, member, MonotonicClock(), ranks, steps_of)
        steps = StepsTaken(member.replica.name, config.inner.steps)
        if saved is not None:
            trainer.load(states.path(saved))
            outer.load(states.path(saved), saved, holds)
            outer.restore()
            steps.load(states.path(saved))
        reporter = Reporter(exchange, member.name)
        loop = TrainingLoop(
            trainer,
            member.replica.name,
            outer,
            seat,
            reporter,
            states,
            length,
            steps,
            gate=gate,
            faults=faults,
            stopping=stopping,
            undoes=config.states.undo,
        )
        if saved is not None:
            loop.load(states.path(saved))
        stopping.listen()
        try:
            loop.run(holds, saved, spec)
            if copies is not None:
                copies.drain()
        except Stopped:
            stopping.leave()
            raise
        finally:
            if copies is not None:
                copies.end()
            reporter.close()


def _copies(config: RunConfig, folder: RunFolder, member: MemberSpec) -> StateCopies | None:
    """Of its states, if another machine may go on with them."""
    return StateCopies(config.store.open(config.name, folder.log), member.name) if config.states.to == "store" else None


def _build(
    spec: RunSpec,
    run: str,
    member: MemberSpec,
    exchange: ExchangeService,
    source: Source | None,
    ranks: Ranks,
    faults: Faults,
    carrier: Carrier | None,
) -> tuple[TrainingMember, OuterRound, int]:
    """What trains, what meets the others, and after which round: that of the run's newest snapshot."""
    held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    basis = [] if spec.largest_rank is None else [BASIS]
    round_, names = exchange.newest_snapshot()
    tensors = exchange.snapshot([*held, *basis, *momentum_of(names, held)], round_)
    start = Start({name: tensors[name] for name in held}, tensors.get(BASIS))
    trainer = build_member(spec, member, start, LinkEnds(), source, ranks)
    outer = OuterRound(
        run,
        member.name,
        member.replica.name,
        trainer.parameters,
        start.parameters,
        HeldBack(exchange, faults),
        spec.config.outer,
        optimizer=round_optimizer(spec, start.basis),
        ranks=ranks,
        keeps_undo=member.stage is not None or spec.config.states.undo or spec.config.outer.keep_local,
        carrier=carrier,
    )
    if round_ > 0:
        momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in momentum_of(names, held)}
        outer.reset(start.parameters, momentum, round_)
    return trainer, outer, round_


class _Links:
    """Of a member to the stages beside it, and what it sent over them and to the exchange. Implements Links."""

    def __init__(self, member: MemberSpec, connections: Connections, shaped: ShapedExchange) -> None:
        self._member, self._connections, self._shaped = member, connections, shaped
        self._ends = LinkEnds()

    def form(self, work: Assignment) -> LinkEnds:
        """See Links."""
        holders = (work.upstream_holder, work.downstream_holder)
        self._ends = self._connections.open(work.epoch, work.upstream, work.downstream, holders)
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        """See Links."""
        self._connections.give_up(before, cause)

    @property
    def ledgers(self) -> Sequence[LedgerOf]:
        """See Links."""
        return list(_ledgers(self._member, self._shaped, self._ends))


def _ledgers(member: MemberSpec, shaped: ShapedExchange, ends: LinkEnds) -> Iterator[LedgerOf]:
    """Each direction of a stage link is counted by the end that sends it; both of the exchange's by the member."""
    link = exchange_link_name(member.name)
    yield link, "forward", shaped.forward
    yield link, "backward", shaped.backward
    if member.stage is not None and ends.downstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index), "forward", ends.downstream.ledger
    if member.stage is not None and ends.upstream is not None:
        yield stage_link_name(member.replica.name, member.stage.index - 1), "backward", ends.upstream.ledger
