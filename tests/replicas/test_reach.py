"""How a member reaches the start of a round that is far ahead of what it holds."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from hetero_pp.core.errors import ExchangeLost
from hetero_pp.messages.messages_pb2 import AssignReply
from replica_groups.engines.ranks import ALONE
from replica_groups.member.take_part import TrainingLoop


def _loop(holds: int) -> tuple[TrainingLoop, Any, Any]:
    """Return the loop of a member with theta after a round, its outer round and its session."""
    fakes: dict[str, Any] = {
        name: MagicMock() for name in ("member", "outer", "session", "reporter", "states", "length")
    }
    outer, session, spec = fakes["outer"], fakes["session"], MagicMock()
    outer.is_settled, outer.theta, outer.ranks, session.form.return_value = True, {}, ALONE, None
    session.heartbeats.differs, fakes["states"].settled_in.return_value, spec.config.checkpoints.every = False, 0, 1
    return TrainingLoop(spec=spec, steps=MagicMock(), holds=holds, has_started=True, **fakes), outer, session


@pytest.mark.parametrize(("newest", "read", "replayed"), [(4, 4, [5]), (1, None, [2, 3, 4, 5])])
def test_who_has_waited_for_long_reads_a_checkpoint_instead_of_rounds_that_the_log_may_lack(
    newest: int, read: int | None, replayed: list[int]
) -> None:
    """The member holds theta after round 1 when its replica is to train round 6."""
    loop, outer, session = _loop(holds=1)
    session.newest_checkpoint.return_value, session.newest_tensors.return_value = (newest, []), (newest, {}, {})
    loop._reach(AssignReply(round=6))
    missed = [] if read is None else [(read, range(2, read + 1))]
    assert [call.args[2:] for call in outer.reset.call_args_list] == missed
    assert [round_ for call in outer.catch_up.call_args_list for round_ in call.args[0]] == replayed


def test_who_cannot_recover_at_once_says_again_that_it_differs() -> None:
    loop, _, session = _loop(holds=5)
    session.newest_checkpoint.return_value = 5, []
    session.newest_tensors.side_effect = [ExchangeLost("it is gone"), (5, {}, {})]
    with pytest.raises(ExchangeLost):
        loop._reach(AssignReply(round=6, heals=True))
    assert session.heartbeats.differs
    loop._reach(AssignReply(round=6, heals=True))
    assert not session.heartbeats.differs
