"""One member's part in a run, from joining to the last round; the same in a process, on ranks and in a thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetero_pp.config.links import exchange_link_name
from hetero_pp.core.device import name_of, use
from hetero_pp.core.errors import Stopped
from hetero_pp.core.files import keep_trying
from hetero_pp.data.sources import Source, open_source, tokens_digest
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.messages.messages_pb2 import Computes
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.rpc.exchange_service import ExchangeService
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.round_optimizer import round_optimizer
from hetero_pp.run.snapshot import BASIS, MOMENTUM, momentum_of
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.store.faults import NO_FAULTS, Faults
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.member.build_member import Start, build_member
from replica_groups.member.collective import CollectiveExchange
from replica_groups.member.commitments import Commitments, CommittedExchange
from replica_groups.member.exchanges import CarriedExchange, HeldBack, ShapedExchange
from replica_groups.member.gate import Gate
from replica_groups.member.inner_loops import StepsTaken
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.reporter import Reporter
from replica_groups.member.round_calls import Carrier
from replica_groups.member.round_length import StepsOf, round_length
from replica_groups.member.saved_states import SavedStates, newest_usable_state
from replica_groups.member.seat import Connections, Links, Seat
from replica_groups.member.state_copies import StateCopies
from replica_groups.member.stopping import NEVER_STOPPED, Stopping
from replica_groups.member.training_loop import TrainingLoop
from replica_groups.member.training_member import TrainingMember


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
    """Train all remaining rounds as one member of a run, on `ranks.device`, or as one of several ranks that form it.

    The caller closes the connections, or aborts them if this function raises HeteroPPError, which means that the run
    failed here or elsewhere. `gate`, if set, delays each round until it is open. `steps_of`, if set, replaces the clock
    in rounds of a fixed time (`round_length`). `faults` are injected. `stopping` asks to save the state and leave.
    """

    def say(line: str) -> None:
        print(f"{member.name}: {line}", file=sys.stderr, flush=True)

    config = spec.config
    use(ranks.device)
    shaped = _shaped(spec, member, connections, stopping)
    first = shaped if ranks.is_first else None
    exchange: ExchangeService = shaped if ranks.world == 1 else CollectiveExchange(first, ranks)
    reads = member.reads_data and config.rehearsal is None
    source = keep_trying(lambda: open_source(config.data, folder.cache), say) if reads else None
    run = exchange.agree(member.name, spec.agreed, tokens_digest(source))
    copies = _copies(config, folder, member) if ranks.is_first else None
    states = SavedStates(folder.state(member.name), run, config.states_every, ranks, copies)
    available, address = states.find(), connections.listen()
    seat = Seat(exchange, member.name, address, available, Links(member, connections, shaped))
    with seat.taken():
        saved = newest_usable_state(exchange, member.name, member.replica.name, states, available)
        spec = spec.with_changes(exchange.changes())
        carrier = first if isinstance(first, CarriedExchange) else None
        tell = say if gate is None else lambda line: None  # a thread shares its output with all members
        committed = CommittedExchange(HeldBack(exchange, faults))
        trainer, outer, holds = _build(
            spec, run, member, committed, source, ranks, folder.path, carrier=carrier, tell=tell
        )
        reporter = Reporter(exchange, member.name)
        reporter.tell(computes=Computes(device=name_of(ranks.device)))
        steps = StepsTaken(member.replica.name, config.inner.steps)
        commitments = None
        if config.audit.recompute is not None:
            commitments = Commitments(member.name, trainer, outer, steps, folder.committed(member.name), committed)
        loop = TrainingLoop(
            trainer,
            member.replica.name,
            outer,
            seat,
            reporter,
            replace(states, every=spec.latest.states_every),
            round_length(spec, member, time.monotonic, ranks, steps_of),
            steps,
            gate=gate,
            faults=faults,
            stopping=stopping,
            undoes=config.states.undo,
            commitments=commitments,
        )
        if saved is not None:
            loop.load(saved)
        _run(loop, holds, saved, spec, copies)


def _run(loop: TrainingLoop, holds: int, saved: int | None, spec: RunSpec, copies: StateCopies | None) -> None:
    """Run the loop, as TrainingLoop.run. At its end, deliver its last reports and the copies of its checkpoints.

    A member that is asked to stop leaves once its state is saved; see Stopping.end for one that fails.
    """
    loop.stopping.listen()
    try:
        loop.run(holds, saved, spec)
        if copies is not None:
            copies.drain()
    except Stopped:
        loop.stopping.leave()
        raise
    finally:
        loop.stopping.end()
        if copies is not None:
            copies.end()
        loop.reporter.close()


def _shaped(spec: RunSpec, member: MemberSpec, connections: Connections, stopping: Stopping) -> ShapedExchange:
    """Return the exchange behind the member's link; with overlap, it carries rounds in the background."""
    kind = CarriedExchange if spec.config.outer.overlap else ShapedExchange
    link = spec.links[exchange_link_name(member.name)]
    return kind(connections.exchange, link, spec.config.seed, connections.lines, stopping)


def _copies(config: RunConfig, folder: RunFolder, member: MemberSpec) -> StateCopies | None:
    """Return the copies of the member's checkpoints in the store, if another machine may take over the slot."""
    return StateCopies(config.store.open(config.name, folder.log), member.name) if config.states.to == "store" else None


def _build(
    spec: RunSpec,
    run: str,
    member: MemberSpec,
    exchange: ExchangeService,
    source: Source | None,
    ranks: Ranks,
    folder: Path,
    carrier: Carrier | None,
    tell: Callable[[str], None],
) -> tuple[TrainingMember, OuterRound, int]:
    """Build the trainer and the outer round from the newest run checkpoint; return them and its round.

    `tell` is given how long it took to read the checkpoint. In a rehearsal nothing is read.
    """
    if spec.config.rehearsal is not None:
        from replica_groups.member.rehearsed import build_rehearsed  # a run that trains does not need it

        return *build_rehearsed(spec, run, member, exchange, carrier), exchange.newest_snapshot()[0]
    held = [*member.owned, *([EMBEDDING] if member.follows_embedding else [])]
    basis = [] if spec.largest_rank is None else [BASIS]
    round_, names = exchange.newest_snapshot()
    began = time.monotonic()
    tensors = exchange.snapshot([*held, *basis, *momentum_of(names, held)], round_)
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    tell(f"read {n_bytes:,} bytes of the snapshot after round {round_} in {time.monotonic() - began:.2f} s")
    start = Start({name: tensors[name] for name in held}, tensors.get(BASIS))
    trainer = build_member(spec, member, start, LinkEnds(), source, ranks, folder)
    outer = OuterRound(
        run,
        member.name,
        member.replica.name,
        trainer.parameters,
        start.parameters,
        exchange,
        spec.config.outer,
        optimizer=round_optimizer(spec, start.basis),
        ranks=ranks,
        keeps_undo=member.stage is not None or spec.config.states.undo or spec.config.outer.keep_local,
        carrier=carrier,
        folder=folder,
    )
    if round_ > 0:
        momentum = {name.removeprefix(MOMENTUM): tensors[name] for name in momentum_of(names, held)}
        outer.reset(start.parameters, momentum, round_)
    return trainer, outer, round_
