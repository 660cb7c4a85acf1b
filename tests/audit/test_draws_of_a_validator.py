"""A validator follows draws: those of a removed record, late files, and files that another validator removed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast
from unittest import mock

import pytest
import torch
from audited_run import audited_spec
from torch import Tensor

from hetero_pp.config.audit import RecomputeSettings
from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import BlobEntry, Commitment, ContributionEntry, Judgement, RoundRecord
from hetero_pp.store.folder import FolderStore
from replica_groups.audit.in_exchange import _InExchange
from replica_groups.audit.recomputation import Recomputation
from replica_groups.audit.recompute import Comparison
from replica_groups.audit.showing import ARRIVED, ROUNDS_TO_SHOW, draw_key, evidence_key
from replica_groups.exchange.log import ContributionLog


class Followed:
    """A validator that follows a run of one replica, `a`."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.store = FolderStore(folder)
        self.check = Recomputation(audited_spec(corpus), RecomputeSettings(), ContributionLog(self.store), None)
        self.kept = True
        """Whether the log has the blobs."""

    def closes(self, round_: int, theta: Mapping[str, Tensor] = MappingProxyType({})) -> list[Judgement]:
        entry = ContributionEntry(replica="a", blobs=[BlobEntry(block="x")], commitments=[Commitment(member="a")])
        entry.generation = round_  # so that no chain is followed
        record = RoundRecord(round=round_, contributions=[entry], sha256=b"r")
        return list(self.check.check(record, theta, self._fetch))

    def _fetch(self, replica: str, block: str) -> bytes:
        if not self.kept:
            raise FileNotFoundError(block)
        return b"blob"

    def draws(self, round_: int, *replicas: str, record: bytes = b"r") -> None:
        self._put(draw_key(round_), {"record": record.hex(), "drawn": replicas})

    def arrives(self, round_: int, **missing: str) -> None:
        self._put(f"{evidence_key(round_, 'a')}/{ARRIVED}", {"missing": missing})

    def _put(self, key: str, content: dict[str, Any]) -> None:
        self.store.put(key, json.dumps(content).encode())


@pytest.fixture
def followed(corpus: Path, tmp_path: Path) -> Iterator[Followed]:
    equal = Comparison(0.0), dict[str, bytes]()
    with mock.patch.object(Recomputation, "again", mock.Mock(return_value=equal)):
        yield Followed(corpus, tmp_path / "log")


def test_the_draw_of_a_record_that_was_removed_is_none(followed: Followed) -> None:
    followed.draws(1, "gone", record=b"of the run before it resumed")
    assert followed.closes(1) == []
    followed.draws(1, "a")
    followed.arrives(1)
    assert [(one.round, one.replica) for one in followed.closes(2)] == [(1, "a")]


def test_what_a_member_did_not_show_is_judged_by_the_exchange_alone(followed: Followed) -> None:
    followed.draws(1, "a")
    followed.arrives(1, a="did not show its checkpoint")
    assert followed.closes(1) == followed.closes(2) == []


def test_parameters_of_rounds_that_wait_for_files_take_no_memory(followed: Followed) -> None:
    theta = {"x": torch.ones(4)}
    is_alive = weakref.ref(theta["x"])
    followed.closes(1, theta)
    followed.draws(1, "a")
    followed.closes(2, theta)
    del theta
    assert is_alive() is None
    followed.arrives(1)
    followed.closes(3)
    before = cast(mock.Mock, Recomputation.again).call_args.args[2]
    assert before.round == 0 and before.parameters["x"].tolist() == [1.0] * 4


def test_files_may_come_after_the_log_has_removed_the_contribution(followed: Followed) -> None:
    followed.draws(1, "a")
    followed.closes(1)
    followed.kept = False
    followed.arrives(1)
    [found] = followed.closes(2)
    assert found.round == 1 and found.recomputed.is_equal


def test_files_that_another_validator_has_removed_are_judged(followed: Followed) -> None:
    with mock.patch.object(Recomputation, "again", mock.Mock(side_effect=FileNotFoundError)):
        followed.draws(1, "a")
        followed.arrives(1)
        assert followed.closes(1) == followed.closes(2) == []


def test_rounds_that_are_never_drawn_are_forgotten(followed: Followed) -> None:
    followed.closes(1)
    followed.draws(1 + ROUNDS_TO_SHOW)
    followed.closes(1 + ROUNDS_TO_SHOW)
    assert not followed.check._undrawn


def test_a_refused_judgement_ends_no_validator() -> None:
    judgements = mock.Mock(take=mock.Mock(side_effect=Refused("about round 1, expected one of the last 64")))
    _InExchange(mock.Mock(), judgements).take([Judgement(round=1)])
    judgements.take.assert_called_once()
