"""A validator follows draws: those of a removed record, late files, and files that another validator removed."""

from __future__ import annotations

import hashlib
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
from replica_groups.audit.showing import ARRIVED, ROUNDS_TO_SHOW, evidence_key
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds.draws import Chain, draw_key, drawn, leads_to


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


SEED = b"s" * 32


def test_secrets_lead_to_the_published_end() -> None:
    chain = Chain(SEED, 12)
    assert leads_to(chain.secret(12), 12, 12, chain.end)
    assert leads_to(chain.secret(40), 40, 12, chain.end)
    assert hashlib.sha256(chain.secret(13)).digest() == chain.secret(12)
    assert chain.secret(chain.after - 1) == SEED


def test_another_secret_does_not() -> None:
    chain = Chain(SEED, 12)
    assert not leads_to(chain.secret(13), 12, 12, chain.end)
    assert not leads_to(bytes(32), 12, 12, chain.end)
    assert Chain(SEED, 12).end != Chain(b"t" * 32, 12).end


def test_each_replica_is_drawn_in_its_share_of_rounds() -> None:
    names = [f"r{number}" for number in range(10)]
    records = [hashlib.sha256(str(number).encode()).digest() for number in range(2000)]
    found = [drawn(SEED, record, names, 0.1) for record in records]
    for name in names:
        assert 150 < sum(name in one for one in found) < 250
    assert drawn(SEED, records[0], names, 1.0) == sorted(names)


def test_a_draw_depends_on_record_and_secret() -> None:
    names = [f"r{number}" for number in range(64)]
    draws = {tuple(drawn(secret, record, names, 0.5)) for secret in (SEED, b"t" * 32) for record in (b"a", b"b")}
    assert len(draws) == 4
    assert drawn(SEED, b"a", names, 0.5) == drawn(SEED, b"a", reversed(names), 0.5)
