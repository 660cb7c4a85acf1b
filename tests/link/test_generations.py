"""Links of successive generations between the same neighbours, in process and over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

import pytest
import torch

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed, LinkTimeout, Refused
from hetero_pp.link.in_process import InProcessLink
from hetero_pp.link.protocol import LinkEnd, Message
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import LinkHeader
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.stage_link import StageLink

SECONDS = 60.0
SPEC = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())


class Neighbours(Protocol):
    """Two neighbouring members: each can open its end for a generation, and give up earlier ones."""

    def above(self, generation: int) -> LinkEnd: ...

    def below(self, generation: int) -> LinkEnd: ...

    def give_up_above(self, before: int, cause: str) -> None: ...

    def give_up_below(self, before: int, cause: str) -> None: ...


class InOneProcess:
    """Neighbours in one process. Implements Neighbours."""

    def __init__(self, stack: ExitStack) -> None:
        self.link = InProcessLink(SPEC, seed=1, lines=Lines())
        self.give_up_above = self.give_up_below = self.link.give_up
        stack.callback(self.link.abort, "the test is over")

    def above(self, generation: int) -> LinkEnd:
        return self.link.end("forward", generation)

    def below(self, generation: int) -> LinkEnd:
        return self.link.end("backward", generation)


class OverGrpc:
    """Neighbours over gRPC. Implements Neighbours."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.target, seed=1), expected=None)
        self.dialer = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1))
        self.address = f"127.0.0.1:{self.server.listen('127.0.0.1:0')}"
        self.give_up_above, self.give_up_below = self.dialer.give_up, self.server.give_up
        stack.callback(self.server.close, grace=0)
        stack.callback(self.dialer.give_up, 1000, "the test is over")
        stack.callback(self.server.give_up, 1000, "the test is over")

    def above(self, generation: int) -> LinkEnd:
        return self.dialer.dial(self.address, generation, SECONDS)

    def below(self, generation: int) -> LinkEnd:
        return self.server.accept(SECONDS, generation)


@pytest.fixture
def over_grpc(stack: ExitStack) -> OverGrpc:
    return OverGrpc(stack)


@pytest.fixture(params=[InOneProcess, OverGrpc])
def neighbours(request: pytest.FixtureRequest, stack: ExitStack) -> Neighbours:
    made: Neighbours = request.param(stack)
    return made


def assert_works(one: LinkEnd, other: LinkEnd, step: int = 3) -> None:
    for sender, receiver in ((one, other), (other, one)):
        sender.send(Message(LinkHeader(step=step), (torch.ones(3),)))
        assert receiver.receive(SECONDS).header.step == step


def test_a_newer_generation_has_a_link_of_its_own_and_its_counts_go_on(neighbours: Neighbours) -> None:
    for generation in (0, 1, 5):
        above, below = neighbours.above(generation), neighbours.below(generation)
        assert_works(above, below, step=generation)
        above.send(Message(LinkHeader(step=99)))  # not received here: it must not come out of the next link
        for end in (above, below):
            end.abort("a stage is replaced")
    assert (above.ledger.of_round(0).messages, below.ledger.of_round(0).messages) == (6, 3)
    assert above.ledger.of_round(0).payload_bytes == 3 * 12


def test_the_first_generation_need_not_be_the_first(neighbours: Neighbours) -> None:
    assert_works(neighbours.above(7), neighbours.below(7))


def test_who_moves_on_ends_the_link_for_its_neighbour(neighbours: Neighbours) -> None:
    above, below = neighbours.above(1), neighbours.below(1)
    assert_works(above, below)
    newer = neighbours.above(2)
    newer.send(Message(LinkHeader(step=7)))
    for end in (above, below):
        with pytest.raises(LinkClosed):
            end.receive(SECONDS)
        with pytest.raises(LinkClosed):
            end.send(Message(LinkHeader()))
    assert neighbours.below(2).receive(SECONDS).header.step == 7


def test_an_generation_that_is_over_for_the_neighbour_is_none_to_go_on_with(neighbours: Neighbours) -> None:
    newer = neighbours.above(3)
    with pytest.raises(LinkClosed, match=r"home\.0 is at generation 3"):
        neighbours.below(2)
    assert_works(newer, neighbours.below(3))


def test_what_is_given_up_is_not_waited_for(neighbours: Neighbours) -> None:
    above, below = neighbours.above(1), neighbours.below(1)
    neighbours.give_up_above(2, "stage 3 is gone")
    neighbours.give_up_below(2, "stage 3 is gone")
    for end in (above, below):
        with pytest.raises(LinkClosed):
            end.receive(SECONDS)
    for open_again in (neighbours.above, neighbours.below):
        with pytest.raises(LinkClosed):
            open_again(1)
    assert_works(neighbours.above(2), neighbours.below(2))


def test_giving_up_what_is_over_changes_nothing(neighbours: Neighbours) -> None:
    above, below = neighbours.above(4), neighbours.below(4)
    neighbours.give_up_above(4, "late news")
    neighbours.give_up_below(2, "later news")
    assert_works(above, below)


# ---- cases that only a network has ----


def test_a_neighbour_of_an_older_generation_is_refused_in_words_and_counts_as_no_stranger(over_grpc: OverGrpc) -> None:
    above, below = over_grpc.above(4), over_grpc.below(4)
    late = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1))
    with pytest.raises(LinkClosed, match="found generation 3, expected at least 4"):
        late.dial(over_grpc.address, 3, SECONDS)
    assert over_grpc.server.refusals == 0
    with pytest.raises(Refused, match=r"home\.0 is already connected"):
        late.dial(over_grpc.address, 4, SECONDS)
    assert_works(above, below)


def test_of_those_that_wait_the_newest_stays(over_grpc: OverGrpc) -> None:
    waiting = over_grpc.above(1)
    newer = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1)).dial(over_grpc.address, 2, SECONDS)
    with pytest.raises(LinkClosed, match=r"the peer aborted: home\.0 is at generation 2"):
        waiting.receive(SECONDS)
    assert_works(newer, over_grpc.below(2))
    newer.abort("the test is over")


def test_a_member_that_is_further_ends_what_waits(over_grpc: OverGrpc) -> None:
    waiting = over_grpc.above(1)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(over_grpc.below, 2)
        with pytest.raises(LinkClosed, match="the peer aborted: this member is at generation 2"):
            waiting.receive(SECONDS)
        assert_works(over_grpc.above(2), accepted.result(SECONDS))


def test_who_waits_is_woken_by_giving_up(over_grpc: OverGrpc) -> None:
    """Both waiting ends are woken: one dials a closed server, and the other waits to be dialled."""
    over_grpc.server.close(grace=0)
    with ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(over_grpc.above, 1), pool.submit(over_grpc.below, 1)]
        over_grpc.give_up_above(2, "stage 3 is gone")
        over_grpc.give_up_below(2, "stage 3 is gone")
        for waiter in waiters:
            with pytest.raises(LinkClosed, match="stage 3 is gone"):
                waiter.result(SECONDS)


def test_an_generation_is_dialled_again_after_nobody_answered(over_grpc: OverGrpc) -> None:
    with pytest.raises(LinkTimeout):
        over_grpc.dialer.dial("127.0.0.1:1", 1, 0.1)
    assert_works(over_grpc.above(1), over_grpc.below(1))
