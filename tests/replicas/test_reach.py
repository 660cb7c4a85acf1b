"""How a member reaches the start of a round that is far ahead of what it holds."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from hetero_pp.messages.messages_pb2 import AssignReply
from replica_groups.engines.ranks import ALONE
from replica_groups.member.take_part import TrainingLoop


@pytest.mark.parametrize(("newest", "read", "replayed"), [(4, 4, [5]), (1, None, [2, 3, 4, 5])])
def test_who_has_waited_for_long_reads_a_checkpoint_instead_of_rounds_that_the_log_may_lack(
    newest: int, read: int | None, replayed: list[int]
) -> None:
    """The member holds theta after round 1 when its replica is to train round 6."""
    fakes: dict[str, Any] = {
        name: MagicMock() for name in ("member", "outer", "session", "reporter", "states", "length")
    }
    outer, session = fakes["outer"], fakes["session"]
    outer.is_settled, outer.theta, outer.ranks, session.form.return_value = True, {}, ALONE, None
    session.newest_checkpoint.return_value, session.newest_tensors.return_value = (newest, []), (newest, {}, {})
    spec, fakes["states"].settled_in.return_value = MagicMock(), 0
    spec.config.checkpoints.every = 1
    loop = TrainingLoop(spec=spec, steps=MagicMock(), holds=1, has_started=True, **fakes)
    loop._reach(AssignReply(round=6))
    missed = [] if read is None else [(read, range(2, read + 1))]
    assert [call.args[2:] for call in outer.reset.call_args_list] == missed
    assert [round_ for call in outer.catch_up.call_args_list for round_ in call.args[0]] == replayed
