"""Commitments of a member in a run that is audited by recomputation, and the checkpoints that it shows if asked.

  <folder>/round-000007/before.safetensors   its state before round 7
  <folder>/round-000007/messages             digests of the messages that it exchanged with other stages in round 7

These are apart from the saved states from which it resumes. The folders of the round in progress and of the round
before it stay, and those that are being shown.

A round begins with the state after the last round that counted the member, so a round that does not is undone. A member
that lost that state begins with a fresh one. The exchange takes no other: nobody could tell it from an invented one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.core.files import complaint, rename_whole
from hetero_pp.data.batches import Hash
from hetero_pp.messages.messages_pb2 import Commitment, ShownFile
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.member.committed_state import BEFORE, MESSAGES, CommittedState, messages_sha256
from replica_groups.member.inner_loops import StepsTaken
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import TrainingMember

_LOST = "its state is not the one after the last round that counted it"

INHERITED_ROUNDS = 32
"""Rounds for which states of an earlier process stay: an audit that asked that process may ask this one."""


class MemberCommitments:
    """Commitments of one member, and its checkpoints from before the newest rounds."""

    def __init__(
        self, session: MemberSession, member: TrainingMember, outer: OuterRound, steps: StepsTaken, folder: Path
    ) -> None:
        """`folder` holds the checkpoints; the session takes the contributions, and the files that an audit asks for."""
        self._session, self._name, self._folder = session, session.member, folder
        self._member, self._outer, self._steps = member, outer, steps
        self._inherited = {number for number, _ in self._kept()}
        """Rounds of an earlier process of the member, for which an audit may ask again."""
        self._before, self._rest = b"", b""
        self._first = {name: tensor.clone() for name, tensor in member.moments().items() if tensor.any()}
        """Those moments that are not zero before the first step."""
        self._text: Hash | None = None
        self._shows: dict[int, threading.Thread] = {}
        """Audited round -> thread that sends the checkpoint from before it."""
        outer.on_compressed = self.commit

    def begin(self, round_: int, committed: bytes) -> None:
        """Save the state before a round, and begin to note on what the member trains.

        `committed`: digest of the state that the exchange expects. With another one the member begins fresh.
        """
        state = self._state(self._steps.known(round_))
        if state.sha256 != committed and self._forget():
            print(f"{self._name}: begins round {round_} without moments and error feedback: {_LOST}", file=sys.stderr)
            state = self._state(self._steps.known(round_))
        self._before, self._rest = state.sha256, state.rest_sha256
        if (batches := self._member.batches) is not None:
            batches.text = self._text = hashlib.sha256()
        try:
            self._forget_before(round_ - 1)
            self._save(state, self._path(round_))
        except OSError as error:
            print(f"{self._name}: its state before round {round_} was not saved: {complaint(error)}", file=sys.stderr)

    def commit(self, round_: int, steps: int) -> None:
        """Commit to a round, after its inner steps and the compression of the contribution."""
        digests = self._member.message_digests()
        if digests and self._path(round_).is_dir():
            self._save_messages(digests, self._path(round_) / MESSAGES)
        self._session.commitment = Commitment(
            member=self._name,
            before=self._before,
            rest=self._rest,
            after=self._state(self._steps.known_after(round_, steps)).sha256,
            text=b"" if self._text is None else self._text.digest(),
            messages=messages_sha256(digests),
        )

    def show(self, round_: int) -> None:
        """Send the checkpoint from before a round in the background, unless it is being sent."""
        if (known := self._shows.get(round_)) is not None and known.is_alive():
            return
        self._shows[round_] = thread = threading.Thread(
            target=self._show, args=(round_,), name=f"shows round {round_} of {self._name}", daemon=True
        )
        thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until everything is shown that an audit asked for, or for some seconds."""
        for thread in list(self._shows.values()):
            thread.join(seconds)

    @torch.no_grad()
    def _forget(self) -> bool:
        """Return to the state before the first step; return whether the member had another one."""
        error, moments = self._outer.error.values(), self._member.moments()
        kept = [name for name, tensor in moments.items() if name not in self._first and tensor.any()]
        kept += [name for name, first in self._first.items() if not torch.equal(moments[name], first)]
        if not kept and not any(one.any() for one in error):
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

    def _save(self, state: CommittedState, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of the same round, before it was repeated
        part = folder.with_name("part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        state.save(part / BEFORE)
        rename_whole(part, folder)  # whoever is drawn has to show it, also after a power cut

    def _save_messages(self, digests: bytes, path: Path) -> None:
        try:
            path.write_bytes(digests)
        except OSError as error:  # a part of them would be other digests
            path.unlink(missing_ok=True)
            print(f"{self._name}: the digests of its messages were not saved: {complaint(error)}", file=sys.stderr)

    def _kept(self) -> Iterator[tuple[int, Path]]:
        """Yield the rounds before which a state is in the folder."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if match := re.fullmatch(r"round-(\d{6,})", path.name):
                yield int(match[1]), path

    def _forget_before(self, round_: int) -> None:
        for number, path in self._kept():
            may_be_asked = number in self._inherited and number > round_ - INHERITED_ROUNDS
            if number < round_ and number not in self._shows and not may_be_asked:
                shutil.rmtree(path, ignore_errors=True)

    def _show(self, round_: int) -> None:
        paths = sorted(path for path in self._path(round_).glob("*") if path.is_file())
        try:
            if not paths:
                raise FileNotFoundError(2, os.strerror(2), str(self._path(round_)))
            for path in paths:
                self._show_file(round_, path)
        except (HeteroPPError, OSError) as error:
            why = complaint(error) if isinstance(error, OSError) else str(error)
            print(f"{self._name}: its state before round {round_} was not shown: {why}", file=sys.stderr, flush=True)
        else:
            del self._shows[round_]

    def _show_file(self, round_: int, path: Path) -> None:
        """Send a file. One that arrived damaged is sent again, once."""
        header = ShownFile(round=round_, name=path.name, size=path.stat().st_size)
        try:
            self._session.show_file(header, path, Caller(self._name))
        except Refused:
            self._session.show_file(header, path, Caller(self._name))


def state_of(member: TrainingMember, outer: OuterRound, position: Any, steps: dict[str, Any] | None) -> CommittedState:
    """Return what a member commits to. `position`: in the data; `steps`: as StepsTaken knows them."""
    error = {f"error:{name}": tensor for name, tensor in outer.error.items()}
    moments = {f"moments:{name}": tensor for name, tensor in member.moments().items()}
    return CommittedState(error | moments, {"data": position, "steps": steps})
