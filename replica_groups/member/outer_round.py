"""A member's side of the outer round: contribute its parameters, apply the included contributions, confirm the result.

On several ranks, each rank works on its own rows of every parameter. Theta at the start of the round, error feedback
and the selection are divided by rows of chunks (`pseudo_gradient.rows`). One parameter at a time is gathered whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.core.device import CPU
from hetero_pp.core.errors import HeteroPPError, Stopped
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.inner import REMEDIES
from hetero_pp.model.transformer import Shapes, block_of, shapes_by_block
from hetero_pp.outer.apply_round import FetchBlob, apply_round, blocks_in, cut_rows, needed_shapes
from hetero_pp.outer.fragments import WHOLE, Fragments
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_sha256, start_before_mean
from hetero_pp.pipeline.coefficients import is_finite
from hetero_pp.pseudo_gradient.contribution import DecodedTensor, ReceivedBlob, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.pseudo_gradient.rows import join, packed
from hetero_pp.pseudo_gradient.selection import generator_of
from replica_groups.engines.engine import ParameterStore
from replica_groups.member.error_feedback import ErrorFeedback, Undecided, is_named
from replica_groups.member.rank_rows import RankRows, kept, read_part, write_part
from replica_groups.member.session import MemberSession


class OuterRound:
    """Keeps theta at the start of the round and the error feedback of the parameters that a member holds.

    A member also follows parameters of which it needs a synchronised copy without training them. An example is the
    token embedding, at stages that derive T_perp from it. With several ranks all of them call `synchronise`.
    """

    def __init__(
        self,
        session: MemberSession,
        parameters: ParameterStore,
        start: Mapping[str, Tensor],
        settings: OuterSettings,
        optimizer: RoundOptimizer | None = None,
        keeps_undo: bool = True,
        folder: Path | None = None,
        fragments: Fragments = WHOLE,
    ) -> None:
        """Start from the parameters of the run checkpoint.

        `start` contains all held and followed parameters, whole; `fragments` are those of the model. With `keeps_undo`,
        a second copy of the error feedback is kept in `folder` (Scratch) while a round is undecided, so that `undo` is
        exact.
        """
        self.session, self.parameters, self.settings = session, parameters, settings
        self.ranks = ranks = session.ranks
        shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
        self.fragments = fragments
        self.part = RankRows(shapes, settings.compression.tile, ranks)
        self.blocks = {block_of(name) for name in parameters.shapes}
        self.optimizer = optimizer or OuterOptimizer(settings)
        self._selects_on = ranks.device if ranks.device.type == "cuda" else CPU
        """Device of the selection. It needs fp64, which other accelerators may lack."""
        kept_on = ranks.device if settings.keep_on_device else CPU
        is_pinned = ranks.device.type == "cuda" and kept_on == CPU
        self.theta = {name: kept(self.part.cut(name, tensor), kept_on, is_pinned) for name, tensor in start.items()}
        error = {name: kept(torch.zeros_like(self.theta[name]), kept_on, is_pinned) for name in parameters.shapes}
        self.feedback = ErrorFeedback(error, settings, Scratch(folder) if keeps_undo else None)
        self.on_compressed: Callable[[int, int], object] | None = None
        """If set, it is called with the round and its steps once a contribution is compressed, before any deposit.

        The run is audited by recomputation then, and a contribution that is not included is taken back as a whole.
        """
        self.own = PendingRounds()
        self._hashes: dict[str, bytes] = {}  # of theta's parameters, on the first rank; rounds change some of them

    @property
    def error(self) -> dict[str, Tensor]:
        """This rank's rows of error feedback, by parameter."""
        return self.feedback.tensors

    @property
    def _own_part(self) -> RankRows | None:
        return self.part if self.ranks.world > 1 else None

    @property
    def is_settled(self) -> bool:
        """Whether this object's state is independent of the rounds that were closed without this member."""
        return self.feedback.sent is None and self.own.local is None and not self.own.trained

    # ---- a round ----

    def synchronise(
        self,
        round_: int,
        generation: int | None = None,
        steps: int = 0,
        on_contributed: Callable[[], object] = lambda: None,
        before_last: Callable[[], object] = lambda: None,
    ) -> RoundRecord:
        """Contribute `steps` inner steps and apply the round, so that all replicas hold the same parameters.

        `on_contributed` is called while the contribution is in transit; with overlap, it may train the next round.
        `before_last`: as in `contribute`.

        Raises Suspended or IncarnationOver if the round has to be trained again; call `undo` then. Raises Stopped if
        the member is asked to stop; after `undo`, `save` writes the state before the round.
        """
        own = self.contribute(round_, generation, steps, before_last)
        if self.session.overlaps:
            self.session.carry(round_, self.needed())
        on_contributed()
        record = self.session.record_of(round_, own, generation, steps)
        before = self.own.before, self.own.after, self.own.met
        if self.on_compressed is not None and self.session.entry(record) is None:
            self.own.after = {}  # as if the round had not been trained
        elif round_ + 1 not in self.own.trained:
            self.own.take_after()
        undecided = self.feedback.undecided
        try:
            is_late = self.session.entry(record) is None and self.session.replica not in record.left_out
            if self.settings.keep_local and is_late:
                self._keep_local(record.round)
                self.apply(record, None)
            else:
                self.own.local = None
                self.apply(record, own if self._decide(record) else None)
        except Stopped:
            # `ErrorFeedback.take_back` then restores the error feedback from before the round. Theta and the outer
            # optimizer's state may be partly those after it, but the process ends, and both are in the run log.
            self.feedback.undecided, self.own.local = undecided, None
            self.own.before, self.own.after, self.own.met = before
            raise
        return record

    def needed(self) -> Collection[str]:
        """Return the blocks whose contributions this member fetches."""
        return shapes_by_block(needed_shapes(self.theta, self.optimizer, self._own_part))

    @torch.no_grad()
    def contribute(
        self,
        round_: int,
        generation: int | None = None,
        steps: int = 0,
        before_last: Callable[[], object] = lambda: None,
    ) -> Mapping[str, bytes]:
        """Compress and deposit every block; return the blobs on the first rank.

        `before_last` is called on all ranks before the contribution can be included: error feedback no longer has it.
        """
        names = [name for shapes in self._shapes_in(round_).values() for name in shapes]
        undecided = self.feedback.begin(round_, generation, names)
        own, blobs = self.compress(round_, undecided)
        if self.on_compressed is not None:
            deque(blobs, maxlen=0)
            self.on_compressed(round_, steps)
            blobs = iter(undecided.blobs.items())
        self.session.contribute(round_, blobs, generation, steps, before_last)
        undecided.is_sent = True
        return own

    def compress(self, round_: int, undecided: Undecided) -> tuple[Mapping[str, bytes], Iterator[tuple[str, bytes]]]:
        """Return where the first rank keeps the blobs by block, and an iterator that makes one after the other."""

        def blobs() -> Iterator[tuple[str, bytes]]:
            for block, shapes in self._shapes_in(round_).items():
                selections = self._selections(round_, shapes)
                if not self.ranks.is_first:
                    deque(selections, maxlen=0)
                    continue
                address = self.session.address_of(round_, block)
                undecided.blobs[block] = encode_blob(address, selections, self.settings.compression)
                yield block, undecided.blobs[block]
            if self.settings.is_streaming:
                self.own.after = {}  # first, to avoid holding it beside the new one
                self.own.after = self._now() | self.own.starts
                self.own.starts.clear()

        return undecided.blobs, blobs()

    def _shapes_in(self, round_: int) -> Mapping[str, Shapes]:
        """Return the shapes of the parameters that this member contributes to a round, by block."""
        shapes = shapes_by_block(self.parameters.shapes)
        return {block: shapes[block] for block in sorted(self.fragments.among(shapes, round_))}

    def _selections(self, round_: int, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...], Selection]]:
        """Yield what to send of each parameter, computed lazily: whole on the first rank, else this rank's part."""
        for name, shape in shapes.items():
            delta = self._contributed(round_, name)
            if not is_finite(delta):
                found = f"{name} is not finite after round {round_}"
                raise HeteroPPError(f"{self.session.member} diverged: {found}; {REMEDIES}")
            yield name, shape, self._select(name, delta, round_)

    def _contributed(self, round_: int, name: str) -> Tensor:
        """Return this rank's rows of the pseudo-gradient, or of the gradient, which is consumed."""
        if self.settings.source == "gradient":
            return self.part.cut(name, self.parameters.read_gradient(name)).to(self._selects_on)
        if self.settings.is_streaming or round_ not in self.own.trained:
            return self._difference(name, self._trained(round_, name))
        return self.own.trained[round_][name].to(self._selects_on)

    def _trained(self, round_: int, name: str) -> Tensor:
        """Return this rank's rows of the replica's own parameter after the inner loop of a round."""
        kept = self.own.trained.get(round_)
        return self._read(name) if kept is None else kept[name].to(self._selects_on)

    def _read(self, name: str) -> Tensor:
        return self.parameters.read(name, self.part.rows[name]).to(self._selects_on)

    def _difference(self, name: str, now: Tensor) -> Tensor:
        start = self.theta[name] if self.settings.is_streaming else self.own.starts.get(name, self.theta[name])
        return start.to(now.device) - now

    def _select(self, name: str, delta: Tensor, round_: int) -> Selection:
        compression, ranks, held = self.settings.compression, self.ranks, self.feedback.to_change(name)
        error = held.to(delta.device)
        generator = generator_of(self.session.run, round_, self.session.replica, name, ranks.rank)
        selection = select(error, delta, compression, ranks.sum if ranks.world > 1 else None, generator)
        if error is not held:
            held.copy_(error)
        if self.settings.overlap or self.settings.mixing:
            sent = DecodedTensor(selection.indices, selection.values)
            # In fragments, the replica's own values and what they lack: exactly its own if every value is sent.
            streams = self.settings.is_streaming
            before = delta if streams else self.theta[name].to(delta.device)
            start = start_before_mean(before, sent, self.settings)
            if streams:
                start.add_(self._trained(round_, name).to(delta.device))
            self.own.starts[name] = start.to(held.device)
        if ranks.world == 1 and delta.device.type == "cpu":
            return selection
        parts = ranks.gather_bytes(save(packed(selection, tuple(delta.shape), compression.tile)))
        if not ranks.is_first:
            return selection
        return join(self.part.shapes[name], compression.tile, [load(part) for part in parts])

    @torch.no_grad()
    def _keep_local(self, round_: int) -> None:
        """Keep the replica's own parameters, and restore error feedback to its state before the contribution."""
        self.own.local = None  # first, to avoid holding two copies at once
        self.own.local = LocalStart(round_, self._now())
        self.feedback.take_back()

    def _decide(self, record: RoundRecord) -> bool:
        """Settle this member's contribution to a round, once the record is known.

        Restore it to error feedback unless the record includes it. Return whether it does. The record may instead
        include a contribution of an earlier generation of the replica, which another coordinator received first. That
        one is then subtracted from error feedback.
        """
        counted = self.session.entry(record)
        if self.on_compressed is not None and counted is None:
            self.feedback.take_back()
            return False
        decided, self.feedback.undecided = self.feedback.undecided, None
        assert decided is not None
        if is_named(counted, decided.generation, decided.digests):
            return True
        own = decided.blobs
        for name, part in self._own_parts(record.round, lambda _, block: self.ranks.broadcast_bytes(own.get(block))):
            self.feedback.give_back(name, part)
        if counted is not None:
            for name, part in self._own_parts(record.round, self.session.fetches(record.round)):
                self.feedback.forget(name, part)
        return False

    def _own_parts(self, round_: int, fetch: FetchBlob) -> Iterator[tuple[str, DecodedTensor]]:
        """Yield a contribution of this replica to a round, for each parameter trained here: this rank's rows."""
        for block, shapes in self._shapes_in(round_).items():
            address = self.session.address_of(round_, block)
            blob = ReceivedBlob(fetch(self.session.replica, block), address, shapes, self.settings.compression)
            for name, shape in shapes.items():
                yield name, cut_rows(blob.tensor(name), shape, self.part.rows[name])

    @torch.no_grad()
    def apply(self, record: RoundRecord, own: Mapping[str, bytes] | None, is_missed: bool = False) -> None:
        """Apply the included contributions of a round.

        `own`: this member's own blobs by block, or None if the record does not include them. Only the first rank needs
        the blobs; the others pass an empty mapping. `is_missed`: the member contributed nothing, so what it has trained
        of the round's fragment before goes on.
        """
        changed, fetched = blocks_in(record), self.session.fetches(record.round)

        def fetch(replica: str, block: str) -> bytes:
            if own is not None and replica == self.session.replica and block in self.blocks:
                return self.ranks.broadcast_bytes(own.get(block))
            return fetched(replica, block)

        with self._meeting(changed, is_missed):
            apply_round(self.theta, self.session.run, record, fetch, self.optimizer, self._own_part)
        for name, rows in self.theta.items():
            whole = self.part.whole(name, rows)
            if name in self.parameters.shapes:
                self.parameters.write(name, whole)
            if self.ranks.is_first and (block_of(name) in changed or name not in self._hashes):
                self._hashes[name] = parameter_sha256(whole)
        self.parameters.finish_writing()
        self.own.trained.pop(record.round, None)
        self.session.confirm(self.session.member, record.round, dict(self._hashes))

    @contextmanager
    def _meeting(self, changed: frozenset[str], is_missed: bool) -> Iterator[None]:
        """Note that theta changes in these blocks. If `is_missed`, what was trained of them goes on from there."""
        trained = {
            name: self.theta[name] - mine
            for name, mine in self.own.before.items()
            if is_missed and block_of(name) in changed - self.own.met
        }
        yield
        for name, difference in trained.items():
            self.own.before[name] = self.theta[name] - difference
        self.own.met |= changed - set(map(block_of, trained))

    # ---- where a round starts ----

    @torch.no_grad()
    def start_streaming(self, is_trained: bool) -> None:
        """Take up the replica's own parameters again, between theta's and a round: after it, if it `is_trained`.

        A fragment that has met since is mixed with theta.
        """
        if not is_trained:
            self.own.after = {}
        own, mixing = self.own.after or self.own.before, self.settings.mixing
        start = {**self.theta, **own}
        for name in own:
            if block_of(name) in self.own.met:
                start[name] = own[name] * mixing + self.theta[name] * (1 - mixing) if mixing else self.theta[name]
        self._write(start)

    def _now(self) -> dict[str, Tensor]:
        """Return copies of this rank's rows of the parameters that are trained, as they are now."""
        return {
            name: self.parameters.read(name, self.part.rows[name]).to(error.device, copy=True)
            for name, error in self.error.items()
        }

    @torch.no_grad()
    def start_local(self, round_: int, trained: int) -> None:
        """Start a round from the replica's own parameters, if it was excluded from the last round; else drop them."""
        local = self.own.local  # valid if all members kept theirs after round `trained`, lately enough
        if local is not None and trained == local.round and round_ - trained <= LOCAL_LASTS:
            self._write(local.rows)
        else:
            self.own.local = None

    @torch.no_grad()
    def start_ahead(self) -> None:
        """Set this member's parameters to the start of the next round while its contribution is in transit."""
        self.own.take_after()
        self._write(self.own.before if self.settings.is_streaming else self.own.starts)

    @torch.no_grad()
    def end_inner_loop(self, round_: int) -> None:
        """With overlap: keep the pseudo-gradient of a round until it is contributed and decided.

        In fragments, keep the parameters instead: a contribution that is repeated then leaves the same start.
        """
        names = [name for shapes in self._shapes_in(round_).values() for name in shapes]
        if self.settings.is_streaming:
            self.own.after = self._now()
            self.own.trained[round_] = {name: self.own.after[name] for name in names}
        else:
            own = {name: self._difference(name, self._read(name)).to(self.theta[name].device) for name in names}
            self.own.trained[round_] = own
        self.own.starts.clear()

    @torch.no_grad()
    def restore(self) -> None:
        """Overwrite this member's parameters with theta."""
        self._write(self.theta)

    def _write(self, rows: Mapping[str, Tensor]) -> None:
        """Overwrite this member's parameters from each rank's rows."""
        for name in self.parameters.shapes:
            self.parameters.write(name, self.part.whole(name, rows[name]))
        self.parameters.finish_writing()

    def undo(self) -> None:
        """Return to the start of the round: restore the error feedback before the undecided contribution.

        With overlap, rounds trained ahead of the undecided one are dropped. Error feedback stays until the round is
        decided or contributed to again, because the contribution may be included although the replica reforms.
        """
        self.own.after = {}
        if self.settings.overlap:
            self.own.starts.clear()
            if (sent := self.feedback.sent) is not None:
                self.own.trained = {number: one for number, one in self.own.trained.items() if number <= sent.round}
            self.session.give_up_carried()
        else:
            self.feedback.take_back()

    def catch_up(self, rounds: range, stale: range = range(0)) -> None:
        """Apply rounds that were closed without this member.

        Error feedback that was saved before the rounds of `stale` still holds what those rounds included from this
        replica. The included values are set to zero. The others decay as if no pseudo-gradient had been added; the
        pseudo-gradients of those rounds are lost. Both ranges end at the same round, unless one is empty.
        """
        either = [one for one in (rounds, stale) if one] or [range(0)]
        for round_ in range(min(one.start for one in either), max(one.stop for one in either)):
            record = self.session.record_of(round_)
            is_included = self.session.entry(record) is not None
            if round_ in stale and is_included:
                self.own.local = None
            if has_sent := (sent := self.feedback.sent) is not None and sent.round == round_:
                self._decide(record)
            elif round_ in stale and is_included:
                for name, part in self._own_parts(round_, self.session.fetches(round_)):
                    self.feedback.forget(name, part, decays=True)
            if round_ in rounds:
                met = self.own.met
                # A member that is audited by recomputation has to have the state of the last round that counted it.
                is_missed = round_ in stale and not (has_sent or is_included or self.on_compressed)
                self.apply(record, None, is_missed)
                if round_ not in stale:  # a saved state has the replica's own parameters after this round
                    self.own.met = met
            else:
                self.own.met |= blocks_in(record)

    # ---- checkpoints ----

    def reset(
        self, start: Mapping[str, Tensor], momentum: Mapping[str, Tensor], round_: int, missed: range = range(0)
    ) -> None:
        """Take theta after a round, whole, and the outer optimizer's state from a run checkpoint.

        The member's parameters change only with the next `restore`. `missed`: rounds whose place the run checkpoint
        takes. The replica then keeps its training beyond theta, as in `catch_up`; otherwise it is dropped.
        """
        own, self.own = self.own, PendingRounds(self.own.trained)
        if missed:
            self.own.before, self.own.met = own.before, own.met
        changed = frozenset[str]().union(*(self.fragments.among(self.blocks, one) for one in missed))
        self._hashes.clear()
        with self._meeting(changed, is_missed=self.on_compressed is None):
            for name, theta in self.theta.items():
                theta.copy_(self.part.cut(name, start[name]))
        self.optimizer.load({name: self.part.cut(name, one) for name, one in momentum.items()}, round_)

    def save(self, folder: Path) -> None:
        """Write this rank's error feedback, and what the replica trained beyond theta.

        Theta and the outer optimizer's state are in the run checkpoints. A replica whose contribution is included, as a
        checkpoint with an undecided one assumes, has no parameters of its own.
        """
        tensors = {f"error:{name}": tensor for name, tensor in self.error.items()}
        undecided = self.feedback.undecided
        own = {} if undecided is not None else self.own.tensors()
        own |= self.own.streaming(None if undecided is None else self._shapes_in(undecided.round))
        write_part(folder, self.ranks, tensors | own)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, on any number of ranks."""
        tensors = read_part(folder, self.ranks, self.part.shapes, self.settings.compression.tile)
        for name, error in self.error.items():
            error.copy_(tensors[f"error:{name}"])
        self.feedback.undecided = None
        self.own.load(tensors)


# Rounds that a replica has trained and theta does not contain: rounds ahead of it, or a round that excluded it.


_TRAINED = "trained:"
"""Key prefix in saved states for rounds that wait to be contributed; the round and the name follow."""
_OWN, _MET = "own:", "met:"
"""Key prefixes for the replica's own parameters in fragments: those that go on, and those that are to be mixed."""
_LOCAL = "local:"
"""Key prefix in saved states for the replica's own parameters after a round; the round and the name follow."""

LOCAL_LASTS = 2
"""Number of rounds after which a replica's own parameters are dropped.

A late replica usually skips one round. After a longer absence its parameters would pull theta back.
"""


@dataclass(frozen=True, eq=False)
class LocalStart:
    """With keep_local: the replica's own parameters (this rank's rows) after a round that excluded it."""

    round: int
    rows: Mapping[str, Tensor]


class PendingRounds:
    """This rank's rows of the replica's own states, by parameter."""

    def __init__(self, trained: dict[int, dict[str, Tensor]] | None = None) -> None:
        self.starts: dict[str, Tensor] = {}
        """The replica's parameters at the start of a round, where they differ from theta."""
        self.trained: dict[int, dict[str, Tensor]] = trained or {}
        """With overlap: round -> pseudo-gradients (in fragments, parameters) of trained and undecided rounds."""
        self.local: LocalStart | None = None
        self.before: dict[str, Tensor] = {}
        """In fragments: the replica's parameters before the inner loop, where they differ from theta."""
        self.after: dict[str, Tensor] = {}
        """In fragments: the same after an inner loop whose round is not decided; empty if there is none."""
        self.met: frozenset[str] = frozenset()
        """Blocks of these that rounds have synchronised since: a round starts from theta there, or from both, mixed."""

    def beyond(self, round_: int) -> int:
        """Return the last round that was trained here but is not part of theta after `round_`; 0 if there is none."""
        if round_ + 1 in self.trained:
            return round_ + 1
        return 0 if self.local is None else self.local.round

    def take_after(self) -> None:
        """Take the parameters after the inner loop as those before the next one."""
        if self.after:
            self.before, self.after, self.met = self.after, {}, frozenset()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a saved state holds of this."""
        tensors: dict[str, Tensor] = {}
        for round_, trained in self.trained.items():
            # A stage that contributes nothing to a round has trained it, too: an empty tensor says so.
            named = trained or {"": torch.empty(0)}
            # Tensors of a safetensors file may not share memory.
            own = {name: one.clone() if one is self.after.get(name) else one for name, one in named.items()}
            tensors |= {f"{_TRAINED}{round_}:{name}": tensor for name, tensor in own.items()}
        if self.local is not None:
            tensors |= {f"{_LOCAL}{self.local.round}:{name}": tensor for name, tensor in self.local.rows.items()}
        return tensors

    def streaming(self, meets: Collection[str] | None) -> dict[str, Tensor]:
        """Return what a saved state holds of the parameters in fragments. `meets`: the blocks of an undecided round.

        A state with an undecided round has the parameters after its inner loop, which only that round will change.
        """
        met = self.met if meets is None else meets
        return {
            f"{_MET if block_of(name) in met else _OWN}0:{name}": tensor
            for name, tensor in (self.after or self.before).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` and `streaming` returned; other tensors are ignored."""
        local = _rounds_in(tensors, _LOCAL)
        self.local = next((LocalStart(number, rows) for number, rows in local.items()), None)
        self.trained |= _rounds_in(tensors, _TRAINED)
        met = _rounds_in(tensors, _MET).get(0, {})
        self.before = _rounds_in(tensors, _OWN).get(0, {}) | met
        self.after, self.met = dict(self.before) if self.trained else {}, frozenset(map(block_of, met))


def _rounds_in(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of a saved state whose keys are `prefix`, a round and a parameter, by round."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            number, name = key.removeprefix(prefix).split(":")
            found.setdefault(int(number), {}).update({name: tensor} if name else {})
    return found
