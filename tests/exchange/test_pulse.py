"""What a member does that hears from the exchange that it has to stop, or is not let in any more."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from members import TIMEOUT

from hetero_pp.errors import ExchangeLost, HeteroPPError, LinkClosed, Refused, RunFailed
from hetero_pp.link.epochs import Epochs
from hetero_pp.outer.exchange_service import ExchangeService, Standing
from hetero_pp.rpc.link_end import GrpcLinkEnd
from replica_groups.exchange import pulse as pulse_module
from replica_groups.exchange.pulse import Pulse


class Heard:
    """An exchange that answers beats with these, the last of them again and again."""

    def __init__(self, *answers: Standing | HeteroPPError) -> None:
        self._answers = list(answers)
        self.beats = 0

    def beat(self, *_: object) -> Standing:
        self.beats += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, HeteroPPError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "SECONDS_BETWEEN_BEATS", 0.001)


@pytest.mark.parametrize("error", [Refused("it was taken back"), RunFailed("another has failed")])
def test_who_is_let_in_no_more_waits_for_no_neighbour(error: HeteroPPError) -> None:
    """Not for a link that is being formed either, whose epoch no beat has told yet."""
    epochs: Epochs[GrpcLinkEnd] = Epochs("home.0")
    pulse = Pulse(cast(ExchangeService, Heard(Standing(), error)), "home.1", epochs.give_up)
    pulse.trains(1, 4)
    with pulse.beating(), pytest.raises(LinkClosed, match=str(error)):
        epochs.take(9, TIMEOUT)


def test_who_is_suspended_gives_up_the_links_of_that_epoch_alone() -> None:
    given_up, told = list[tuple[int, str]](), threading.Event()

    def give_up(before: int, cause: str) -> None:
        given_up.append((before, cause))
        told.set()

    exchange = Heard(ExchangeLost("gone"), Standing(False, 4, "home.0 is gone"))
    pulse = Pulse(cast(ExchangeService, exchange), "home.1", give_up)
    pulse.trains(1, 4)
    with pulse.beating():
        assert told.wait(TIMEOUT)
    assert given_up[0] == (5, "home.0 is gone")
