"""Commitments of members to their rounds, in a run whose audits may ask them to show something, and their check.

A member that reads the corpus commits to its text. In a run that is audited by recomputation, each member commits to
its state before and after a round (CommittedState), too, and to its messages. It keeps what an audit may ask for
(MemberCommitments):

  <folder>/round-000007/before.safetensors   its state before round 7
  <folder>/round-000007/messages             digests of the messages that it exchanged with other stages in round 7
  <folder>/round-000007/text                 tokens of round 7, if the corpus is streamed

These are apart from the saved states from which it resumes. The folders of the round in progress and of the round
before it stay, and those that are being shown.

A round begins with the state after the last round that counted the member, so a round that does not is undone. A member
that lost that state begins with a fresh one: no moments, and no error feedback. The exchange compares digests before it
takes a contribution (Commitments), and the record keeps them. So no member can bring an invented state, which nobody
could tell from its own, not even one that leaves and joins again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile, HeteroPPError, Refused
from hetero_pp.core.files import complaint, rename_whole
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.data.batches import RoundText, sequence_digests
from hetero_pp.messages.messages_pb2 import Asked, Commitment, ContributionEntry, RoundRecord, ShownFile, StageMessages
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.member.inner_loops import StepsTaken
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.take_part import NOT_AUDITED, MemberAudit
from replica_groups.member.trainers import TrainingMember

BEFORE, MESSAGES, TEXT = "before.safetensors", "messages", "text"
"""Files that a member shows: its state before the drawn round, the digests of its messages in that round, and text.

A text that is shown has the digests of all sequences of the round (sequence_digests), and then the drawn ones.
"""

MOST_RESTARTED, AMONG = 4, 16
"""A replica may have so many contributions with restarts among its last 16 that count; further ones are left out.

So a group in which a stage dies in every tenth round loses one contribution in 180.
"""

_REST = "rest"
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class CommittedState:
    """A member's state before a round, or after it: moments, error feedback and position in the data, without pickle.

    In fragments, the member's own parameters at the end of the last round that counted it belong to its state.

    The digest depends on the names, shapes and bytes of the tensors and on the JSON of the rest, not on the file. Theta
    is not part of it, because it follows from the run log. Tensors that are all zero are left out, so that everybody
    knows the digest of a state without moments and error feedback, whatever its size.
    """

    tensors: Mapping[str, Tensor]  # moments, anchors, error feedback, own parameters by name; they may be in use
    rest: Mapping[str, Any]  # position in the data, and the number of steps if rounds have a fixed time; plain JSON

    @property
    def sha256(self) -> bytes:
        """The digest to which the member commits."""
        return state_sha256(self.rest_sha256, tensors_sha256(self.tensors, self.tensors.__getitem__))

    @property
    def rest_sha256(self) -> bytes:
        return hashlib.sha256(_text(self.rest).encode()).digest()

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(tensors, path, {_REST: _text(self.rest)})


def messages_sha256(digests: bytes) -> bytes:
    """Return what a member commits to of the digests of its messages (StageMessages); empty without any.

    Signatures are left out. They differ each time, and a group may train a round twice in one generation, if a link
    breaks. Raises DamagedFile for other bytes.
    """
    try:
        return hashlib.sha256(StageMessages.FromString(digests).records).digest() if digests else b""
    except DecodeError:
        raise DamagedFile(f"{MESSAGES}: found {len(digests)} bytes that are no digests of messages") from None


def shown_text(data: bytes, sequences: Sequence[int], count: int, vocabulary: int, committed: bytes) -> np.ndarray:
    """Return the drawn sequences of a round of `count` sequences that a member showed, as int32 [S, L + 1].

    Raises DamagedFile for a text that does not match what the member committed to, or that is not of this vocabulary.
    """
    digests = data[: count * _DIGEST]
    rows = np.frombuffer(data[count * _DIGEST :], "<i4").reshape(len(sequences), -1)
    drawn = b"".join(digests[number * _DIGEST : (number + 1) * _DIGEST] for number in sequences)
    is_right = hashlib.sha256(digests).digest() == committed and sequence_digests(rows) == drawn
    if not is_right or rows.min() < 0 or rows.max() >= vocabulary:
        raise DamagedFile(f"{TEXT}: found another text than the member committed to")
    return rows


def load_state(path: Path) -> CommittedState:
    """Return the state in a file. Raises DamagedFile for a file that is none; the tensors may still have any shape."""
    with _opened(path) as (file, rest):
        return CommittedState({name: file.get_tensor(name) for name in file.keys()}, rest)  # noqa: SIM118


def sha256_in(path: Path) -> bytes:
    """Return the digest of the state in a file, with one tensor in memory at a time. Raises DamagedFile."""
    with _opened(path) as (file, rest):
        return state_sha256(CommittedState({}, rest).rest_sha256, tensors_sha256(file.keys(), file.get_tensor))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[safe_open, dict[str, Any]]]:
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads((file.metadata() or {})[_REST])
            if not isinstance(rest, dict):
                raise ValueError("the rest is no object")
            yield file, rest
    except (SafetensorError, ValueError, KeyError, RecursionError, RuntimeError, TypeError) as error:
        raise DamagedFile(f"{path.name}: found no saved state ({type(error).__name__})") from None


def state_sha256(rest: bytes, tensors: bytes) -> bytes:
    """Return the digest of a state from those of its two parts."""
    return hashlib.sha256(rest + tensors).digest()


def tensors_sha256(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> bytes:
    """Return the digest of the tensors that are not all zero."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensor_of(name).detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8)
        if data.any():
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(data.numpy().data)
    return digest.digest()


def _text(rest: Mapping[str, Any]) -> str:
    return json.dumps(rest, sort_keys=True)


# ---- the member ----

_LOST = "its state is not the one after the last round that counted it"

SECONDS_TO_SHOW = 600.0  # longest time for which a member waits until a checkpoint is shown, also after the last round

INHERITED_ROUNDS = 32
"""Rounds for which states of an earlier process stay: an audit that asked that process may ask this one."""


class MemberCommitments(MemberAudit):
    """Commitments of one member, and its checkpoints from before the newest rounds, or their text."""

    def __init__(
        self,
        session: MemberSession,
        member: TrainingMember,
        outer: OuterRound,
        steps: StepsTaken,
        folder: Path,
        states: bool = True,
        columns: int | None = None,
    ) -> None:
        """`folder` holds the checkpoints; the session takes the contributions, and the files that an audit asks for.

        `states`: whether the member commits to its states, too. `columns`: tokens of a sequence, if the text is shown.
        """
        self._session, self._name, self._folder = session, session.member, folder
        self.undoes_uncounted, self._columns = states, columns
        self._rounds_kept = 1 if columns is None else 2  # with overlap, the round before is still in progress
        self._member, self._outer, self._steps = member, outer, steps
        self._inherited = {number for number, _ in self._kept()}
        """Rounds of an earlier process of the member, for which an audit may ask again."""
        self._before, self._rest = b"", b""
        self._first = {name: tensor.clone() for name, tensor in member.moments().items() if tensor.any()}
        """Those moments that are not zero before the first step."""
        self._texts: dict[int, RoundText] = {}  # text of the round in progress, and of one that is trained ahead
        self._shows: dict[tuple[int, bool], threading.Thread] = {}
        """(drawn round, whether its text is shown) -> thread that sends what was asked for."""
        if states:
            outer.on_compressed = self.commit

    def begin(self, round_: int, committed: bytes) -> None:
        """Save the state before a round, if the member commits to it.

        `committed`: digest of the state that the exchange expects. With another one the member begins fresh.
        """
        if not self.undoes_uncounted:
            return
        state = self._state(self._steps.known(round_))
        if state.sha256 != committed and self._forget():
            print(f"{self._name}: begins round {round_} without moments and error feedback: {_LOST}", file=sys.stderr)
            state = self._state(self._steps.known(round_))
        self._before, self._rest = state.sha256, state.rest_sha256
        try:
            self._forget_before(round_ - self._rounds_kept)
            folder = self._path(round_)
            shutil.rmtree(folder, ignore_errors=True)  # of the same round, before it was repeated
            part = folder.with_name("part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            state.save(part / BEFORE)
            rename_whole(part, folder)  # whoever is drawn has to show it, also after a power cut
        except OSError as error:
            print(f"{self._name}: its state before round {round_} was not saved: {complaint(error)}", file=sys.stderr)

    def trains(self, round_: int) -> None:
        """Begin to note on what the member trains in a round."""
        if (batches := self._member.batches) is None:
            return
        path = None
        if self._columns is not None and self._session.ranks.is_first:
            self._forget_before(round_ - self._rounds_kept)
            with suppress(OSError):
                self._path(round_).mkdir(parents=True, exist_ok=True)
            path = self._path(round_) / TEXT
        batches.text = RoundText(path)
        self._texts = {number: one for number, one in self._texts.items() if number == round_ - 1}
        self._texts[round_] = batches.text

    def contributes(self, round_: int, steps: int) -> None:
        """Commit to the text of a round, if that is all that the member commits to."""
        if not self.undoes_uncounted:
            self._session.commitment = self._of_text(round_)

    def _of_text(self, round_: int) -> Commitment:
        made = Commitment(member=self._name)
        if (batches := self._member.batches) is not None:
            if (text := self._texts.get(round_)) is None:  # an earlier process has trained the round ahead
                text = RoundText()
                with suppress(OSError, ValueError):
                    text.add(torch.from_numpy(self._kept_text(round_)))
            made.text, made.first = text.digest(), self._steps.before(round_) - batches.first
        return made

    def _kept_text(self, round_: int) -> np.ndarray:
        assert self._columns is not None, "only text that is shown is kept"
        return np.fromfile(self._path(round_) / TEXT, "<i4").reshape(-1, self._columns)

    def commit(self, round_: int, steps: int) -> None:
        """Commit to a round, after its inner steps and the compression of the contribution."""
        digests = self._member.message_digests()
        if digests and (folder := self._path(round_)).is_dir():
            path = folder / MESSAGES
            try:
                path.write_bytes(digests)
            except OSError as error:  # a part of them would be other digests
                path.unlink(missing_ok=True)
                why = complaint(error)
                print(f"{self._name}: the digests of its messages were not saved: {why}", file=sys.stderr)
        after = self._state(self._steps.known_after(round_, steps)).sha256
        made = Commitment(before=self._before, rest=self._rest, after=after, messages=messages_sha256(digests))
        made.MergeFrom(self._of_text(round_))
        self._session.commitment = made

    def show(self, asked: Asked) -> None:
        """Send what an audit asks for in the background, unless it is being sent."""
        key = asked.round, bool(asked.sequences)
        if not self._session.ranks.is_first or ((known := self._shows.get(key)) is not None and known.is_alive()):
            return
        self._shows[key] = thread = threading.Thread(
            target=self._show, args=(asked,), name=f"shows round {asked.round} of {self._name}", daemon=True
        )
        thread.start()

    def wait(self, allowed_to_stop: AbstractContextManager[None]) -> None:
        with allowed_to_stop:
            for thread in list(self._shows.values()):
                thread.join(SECONDS_TO_SHOW)

    @torch.no_grad()
    def _forget(self) -> bool:
        """Return to the state before the first step; return whether the member had another one."""
        error, moments = self._outer.error.values(), self._member.moments()
        own, self._outer.own.before = self._outer.own.before, {}
        kept = [name for name, tensor in moments.items() if name not in self._first and tensor.any()]
        kept += [name for name, first in self._first.items() if not torch.equal(moments[name], first)]
        if not kept and not own and not any(one.any() for one in error):
            return False
        for one in error:
            one.zero_()
        fresh = {name: self._first.get(name, torch.zeros_like(tensor)) for name, tensor in moments.items()}
        self._member.load_moments(fresh)
        self._member.start_round(self._outer)
        return True

    def _state(self, steps: dict[str, Any] | None) -> CommittedState:
        batches = self._member.batches
        return state_of(self._member, self._outer, None if batches is None else batches.state(), steps)

    def _path(self, round_: int) -> Path:
        return self._folder / f"round-{round_:06d}"

    def _kept(self) -> Iterator[tuple[int, Path]]:
        """Yield the rounds before which a state is in the folder."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := re.fullmatch(r"round-(\d{6,})", path.name):
                yield int(match[1]), path

    def _forget_before(self, round_: int) -> None:
        for number, path in self._kept():
            may_be_asked = number in self._inherited and number > round_ - INHERITED_ROUNDS
            if number < round_ and number not in {shown for shown, _ in self._shows} and not may_be_asked:
                shutil.rmtree(path, ignore_errors=True)

    def _show(self, asked: Asked) -> None:
        round_, folder = asked.round, self._path(asked.round)
        try:
            if asked.sequences:
                rows, drawn = self._kept_text(round_), folder / "drawn"
                drawn.mkdir(exist_ok=True)
                (drawn / TEXT).write_bytes(sequence_digests(rows) + rows[list(asked.sequences)].tobytes())
                folder = drawn
            paths = sorted(path for path in folder.glob("*") if path.is_file())
            if not asked.sequences:  # the text of a whole round is shown to nobody
                paths = [path for path in paths if path.name != TEXT]
            if not paths:
                raise FileNotFoundError(2, os.strerror(2), str(self._path(round_)))
            for path in paths:
                header, own = ShownFile(round=round_, name=path.name, size=path.stat().st_size), Caller(self._name)
                try:
                    self._session.show_file(header, path, own)
                except Refused:  # it may have arrived damaged: once more
                    self._session.show_file(header, path, own)
        except (HeteroPPError, OSError, ValueError, IndexError) as error:
            why = complaint(error) if isinstance(error, OSError) else str(error)
            what = f"its text of round {round_}" if asked.sequences else f"its state before round {round_}"
            print(f"{self._name}: {what} was not shown: {why}", file=sys.stderr, flush=True)
        else:
            del self._shows[round_, bool(asked.sequences)]


def state_of(member: TrainingMember, outer: OuterRound, position: Any, steps: dict[str, Any] | None) -> CommittedState:
    """Return what a member commits to. `position`: in the data; `steps`: as StepsTaken knows them."""
    error = {f"error:{name}": tensor for name, tensor in outer.error.items()}
    own = {f"own:{name}": tensor for name, tensor in (outer.own.after or outer.own.before).items()}
    moments = {f"moments:{name}": tensor for name, tensor in member.moments().items()}
    return CommittedState(error | own | moments, {"data": position, "steps": steps})


def audited_member(
    spec: RunSpec,
    folder: RunFolder,
    session: MemberSession,
    member: TrainingMember,
    outer: OuterRound,
    steps: StepsTaken,
) -> MemberAudit:
    """Return a member's part in the audits of its run, for `take_part`."""
    recomputes, data = spec.config.audit.recompute is not None, spec.config.data
    commits = spec.config.commits_to_text and member.batches is not None
    if not recomputes and not commits:
        return NOT_AUDITED
    own = session, member, outer, steps, folder.committed(session.member)
    columns = data.sequence_length + 1 if commits and data.streamed is not None else None
    return MemberCommitments(*own, recomputes, columns)


# ---- the exchange ----

_ROUNDS_KEPT = 4
_MOST_FIRST = 1 << 40  # number of a batch that no honest replica reaches

ROUNDS_REMEMBERED = 256  # rounds for which a member that no round counts may still return with its state


class Commitments:
    """Newest commitments of members. Thread-safe."""

    def __init__(
        self, members: Mapping[str, str], readers: Collection[str], fresh: Mapping[str, bytes], states: bool = True
    ) -> None:
        """`members`: member -> replica. `readers` commit to their text.

        `fresh`: member -> digest of the tensors of its state before its first step. `states`: whether all commit to
        their states.
        """
        self._members, self._readers, self._fresh, self._states = members, readers, fresh, states
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str, int], Commitment] = {}  # (round, member, generation) -> the commitment
        self._last_round = 0
        self._after: dict[str, tuple[int, bytes]] = {}
        """Member -> the last round that counted it, and the digest of its state after that."""
        self._restarted: dict[str, list[bool]] = {}
        """Replica -> for each of its newest contributions that count, whether it had restarts and cannot be drawn."""

    def begin(self, last_round: int, record_of: Callable[[int], RoundRecord]) -> None:
        """Take the states after a round, from which the run begins or resumes."""
        with self._lock:
            self._last_round, self._after, self._restarted = last_round, {}, {}
        for round_ in range(max(1, last_round - ROUNDS_REMEMBERED + 1), last_round + 1):
            with suppress(DamagedFile, FileNotFoundError):  # members that it counts may have to begin fresh
                self.closed(record_of(round_))

    def closed(self, record: RoundRecord) -> None:
        """Take the states after a round that is closed."""
        with self._lock:
            self._last_round = record.round
            for entry in record.contributions:
                self._after |= {one.member: (record.round, one.after) for one in entry.commitments}
                known = self._restarted.get(entry.replica, [])
                self._restarted[entry.replica] = [*known, bool(entry.restarts)][1 - AMONG :]

    def has_many_restarts(self, entry: ContributionEntry) -> bool:
        """Return whether a contribution has restarts, and too many of the replica's last ones that count had some.

        Contributions with restarts are not drawn, so they are a bounded share of those that count.
        """
        with self._lock:
            return bool(entry.restarts) and sum(self._restarted.get(entry.replica, ())) >= MOST_RESTARTED

    def expected(self, member: str) -> bytes:
        """Return the digest of the state with which a member begins the open round; empty: a fresh one."""
        with self._lock:
            round_, after = self._after.get(member, (0, b""))
            return after if round_ > self._last_round - ROUNDS_REMEMBERED else b""

    def take(self, member: str, round_: int, generation: int, commitment: Commitment, holder: int) -> str | None:
        """Keep what came with a blob; return a complaint if it is missing, malformed, or a second commitment."""
        if not self._states and member not in self._readers:
            return None
        if (complaint := self._complaint(member, round_, commitment)) is not None:
            return complaint
        commitment.holder = holder
        with self._lock:
            known = self._kept.setdefault((round_, member, generation), commitment)
            self._kept = {key: one for key, one in self._kept.items() if key[0] > round_ - _ROUNDS_KEPT}
        return None if known == commitment else f"a second, different commitment for round {round_}"

    def add_to(self, record: RoundRecord) -> None:
        """Add to each contribution what its members committed to, by name."""
        for entry in record.contributions:
            for member in sorted(name for name, replica in self._members.items() if replica == entry.replica):
                with self._lock:
                    found = self._kept.get((record.round, member, entry.generation))
                if found is not None:
                    entry.commitments.append(found)

    def _complaint(self, member: str, round_: int, found: Commitment) -> str | None:
        if not found.member:
            return "found a contribution without a commitment, expected `audit` as on the exchange's host"
        if found.member != member:
            return f"found a commitment of `{found.member[:80]}`, expected its own"
        lengths = [len(found.before), len(found.after), len(found.rest), len(found.text), len(found.messages)]
        # A stage also commits to its messages with others. One without a digest of them is not judged.
        has_neighbours = list(self._members.values()).count(self._members[member]) > 1
        needed = [*[self._states] * 3, member in self._readers, self._states and has_neighbours]
        if lengths != (expected := [_DIGEST * one for one in needed]):
            return f"found a commitment with digests of {lengths} bytes, expected {expected}"
        if found.first > _MOST_FIRST:
            return f"found batch {found.first} as the first of round {round_}, expected at most {_MOST_FIRST}"
        if not self._states:
            return None
        known = self.expected(member)
        is_open = round_ > self._last_round  # a round that has closed since may have counted it
        if is_open and found.before not in (known, state_sha256(found.rest, self._fresh[member])):
            last = "the one after the last round that counted it, or " if known else ""
            return f"began round {round_} with an unknown state, expected {last}a fresh one"
        return None
