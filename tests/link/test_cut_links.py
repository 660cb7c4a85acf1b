"""Links whose connection is cut while both ends live: they continue where they were, with the same bits."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from cutting_proxy import CuttingProxy
from opened_links import line
from stage_members import StageMembers, group_spec, links_of

from hetero_pp.config.lines import LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import ACKNOWLEDGED_EVERY, FRAME_BYTES, PEER_CLOSED, LinkEnds, Message
from hetero_pp.messages.messages_pb2 import LinkHeader
from hetero_pp.program.launch.fork_server import fork_server
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.stage_link import StageLink

SECONDS = 60.0
SPEC = LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape())
SHAPE = LinkShape(bandwidth=200e6, latency=0.002, jitter=0.001)
LINES = [line(name, (name,), 400e6, 400e6, 0.001) for name in ("home.0", "home.1")]
SPECS = {
    "plain": SPEC,
    "shaped": LinkSpec("home.0-1", "home.0", "home.1", SHAPE, SHAPE),
    "lines": LinkSpec("home.0-1", "home.0", "home.1", LinkShape(), LinkShape(), *LINES),
}


class CutLink:
    """Both ends of a link that are connected through a proxy."""

    def __init__(
        self,
        stack: ExitStack,
        spec: LinkSpec = SPEC,
        patience: float = SECONDS,
        next_cut: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.server = StageLink(
            LinkSide(spec, Credentials("", "run"), spec.target, seed=1, patience=patience), expected=None
        )
        stack.callback(self.server.close, grace=0)
        self.proxy = CuttingProxy(f"127.0.0.1:{self.server.listen('127.0.0.1:0')}", next_cut)
        stack.callback(self.proxy.close)
        self.dialer = StageLink(LinkSide(spec, Credentials("", "run"), spec.source, seed=1, patience=patience))
        self.above: GrpcLinkEnd = self.dialer.dial(self.proxy.address, 0, SECONDS)
        self.below: GrpcLinkEnd = self.server.accept(SECONDS)
        for end in (self.above, self.below):
            stack.callback(end.abort, "the test is over")


def _message(index: int, size: int) -> Message:
    generator = torch.Generator().manual_seed(index)
    return Message(LinkHeader(step=index), (torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8),))


def _expect(end: GrpcLinkEnd, sizes: list[int]) -> None:
    for index, size in enumerate(sizes):
        message = end.receive(SECONDS)
        assert message.header.step == index
        assert torch.equal(message.tensors[0], _message(index, size).tensors[0])
        end.recycle(message)


def test_nothing_is_lost_and_nothing_comes_twice_where_a_connection_is_cut(stack: ExitStack) -> None:
    link = CutLink(stack)
    for index in range(5):
        for sender, receiver in ((link.above, link.below), (link.below, link.above)):
            sender.send(_message(index, 1000))
            assert receiver.receive(SECONDS).header.step == index
        link.proxy.cut()
    link.above.send(_message(5, 10))
    assert link.below.receive(SECONDS).header.step == 5
    assert link.above.streams > 1
    assert link.server.refusals == 0
    assert link.above.ledger.of_round(0).messages == 6


@pytest.mark.parametrize(("kind", "seed"), [("plain", 0), ("plain", 1), ("shaped", 0), ("lines", 1)])
def test_cut_at_random_in_the_midst_of_messages(stack: ExitStack, kind: str, seed: int) -> None:
    """Messages have no frame, one or several. Both ends send at once, and both close at once."""
    order = random.Random(seed)
    sizes = [order.choice([0, 1, 4000, FRAME_BYTES - 17, 2 * FRAME_BYTES]) for _ in range(30)]
    cuts = iter([order.randrange(40_000_000 if number % 3 else 3000) for number in range(12)])
    link = CutLink(stack, SPECS[kind], next_cut=lambda: next(cuts, None))
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(_expect, end, sizes) for end in (link.above, link.below)]
        for index, size in enumerate(sizes):
            for end in (link.above, link.below):
                end.send(_message(index, size))
        for reader in readers:
            reader.result(SECONDS)
        link.proxy.cut()
        for closed in [pool.submit(end.close) for end in (link.above, link.below)]:
            closed.result(SECONDS)
    for end in (link.above, link.below):
        with pytest.raises(LinkClosed, match="the peer closed the link"):
            end.receive(SECONDS)
        count = end.ledger.of_round(0)
        assert (count.messages, count.payload_bytes) == (len(sizes), sum(sizes))
    assert link.proxy.cuts > 3


@pytest.mark.parametrize("first", ["above", "below"])
def test_a_stage_that_ends_after_its_neighbour_does_not_wait_for_it(stack: ExitStack, first: str) -> None:
    """Its last message cannot arrive any more, but the neighbour lacks nothing else."""
    link = CutLink(stack)
    for index in range(3):
        link.above.send(_message(index, 100))
        link.below.receive(SECONDS)
        link.below.send(_message(index, 100))
        link.above.receive(SECONDS)
    leaves, stays = (link.above, link.below) if first == "above" else (link.below, link.above)
    leaves.close()
    link.proxy.close()
    stays.close()
    assert stays.over == PEER_CLOSED


def test_what_has_arrived_is_not_held(stack: ExitStack) -> None:
    """However many messages are sent, the number that is kept for repetition is bounded."""
    link = CutLink(stack)
    most = 0
    for index in range(200):
        link.above.send(_message(index, 100))
        link.below.receive(SECONDS)
        link.below.send(_message(index, 100))
        link.above.receive(SECONDS)
        most = max(most, len(link.above._outbox), len(link.below._outbox))
    assert most <= ACKNOWLEDGED_EVERY + 1


def test_who_does_not_come_back_is_gone(stack: ExitStack) -> None:
    link = CutLink(stack, patience=0.3)
    link.above.send(_message(0, 10))
    assert link.below.receive(SECONDS).header.step == 0
    link.proxy.close()
    with pytest.raises(LinkClosed, match=r"the peer closed the stream, for 0\.3 s"):
        link.below.receive(SECONDS)
    with pytest.raises(LinkClosed, match=r"the peer disconnected \(.*\), for 0\.3 s"):
        link.above.receive(SECONDS)
    for end in (link.above, link.below):
        with pytest.raises(LinkClosed):
            end.send(_message(1, 10))
        end.close()


def test_abort_wakes_who_waits_for_a_cut_link(stack: ExitStack) -> None:
    link = CutLink(stack)
    link.proxy.close()
    with ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(end.receive, SECONDS) for end in (link.above, link.below)]
        for end in (link.above, link.below):
            end.abort("the group is formed anew")
        for waiter in waiters:
            with pytest.raises(LinkClosed, match="the group is formed anew"):
                waiter.result(SECONDS)


def test_who_dialled_tells_why_it_aborts(stack: ExitStack) -> None:
    """The other end does the same: it sends the cause at once, not when the stall timeout ends."""
    link = CutLink(stack)
    link.above.abort("out of memory")
    with pytest.raises(LinkClosed, match="the peer aborted: out of memory"):
        link.below.receive(SECONDS)


def test_an_end_that_was_aborted_while_cut_off_is_not_gone_on_with(stack: ExitStack) -> None:
    link = CutLink(stack)
    link.below.abort("the round is taken again")
    with pytest.raises(LinkClosed, match="the peer aborted: the round is taken again"):
        link.above.receive(SECONDS)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(link.server.accept, SECONDS)
        above = link.dialer.dial(link.proxy.address, 0, SECONDS)
        above.send(_message(7, 10))
        assert again.result(SECONDS).receive(SECONDS).header.step == 7


def test_a_listener_that_began_anew_does_not_go_on_with_an_old_link(stack: ExitStack) -> None:
    """Another process has taken its slot at the same address."""
    link = CutLink(stack)
    link.above.send(_message(0, 10))
    link.below.receive(SECONDS)
    link.server.close(grace=0)
    other = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.target, seed=1), expected=None)
    other.listen("{}:{}".format(*link.proxy._target))
    stack.callback(other.close, grace=0)
    with pytest.raises(LinkClosed, match="found a link to be continued, expected a new one"):
        link.above.receive(SECONDS)


# ---- a group over links that are cut ----


@pytest.mark.parametrize("seed", range(2))
def test_a_group_over_links_that_are_cut_comes_to_the_same_bits(
    stack: ExitStack, corpus: Path, tmp_path: Path, seed: int
) -> None:
    torch.set_num_threads(1)
    spec, order = group_spec(str(corpus)), random.Random(seed)
    specs = links_of(spec)
    pairs = [in_process_pair(link, seed=1) for link in specs]
    cut = [CutLink(stack, link, next_cut=lambda: order.randrange(100, 3000)) for link in specs]
    outcomes = []
    for links in (pairs, [(one.above, one.below) for one in cut]):
        above, below = [None, *(pair[1] for pair in links)], [*(pair[0] for pair in links), None]
        group = StageMembers(spec, [LinkEnds(*ends) for ends in zip(above, below, strict=True)], tmp_path)
        reports = [[[step.SerializeToString() for step in steps] for steps in group.train(round_)] for round_ in (1, 2)]
        counts = [end.ledger.of_round(round_) for pair in links for end in pair for round_ in (1, 2)]
        outcomes.append((reports, group.evaluate(2), counts, group.parameters()))
    (reports, evaluated, counts, parameters), again = outcomes
    assert again[:3] == (reports, evaluated, counts)
    for name, tensor in parameters.items():
        assert again[3][name].equal(tensor), name
    assert sum(one.proxy.cuts for one in cut) > 5


# ---- a neighbour that is frozen ----


def _answer(end: GrpcLinkEnd) -> None:
    with suppress(LinkClosed):
        while True:
            end.send(Message(end.receive(SECONDS).header))


def _listen(control: Connection) -> None:
    """Run a downstream process that is stopped later."""
    server = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.target, seed=1, patience=SECONDS), expected=None)
    control.send(f"127.0.0.1:{server.listen('127.0.0.1:0')}")
    _answer(server.accept(SECONDS))
    server.close(grace=0)


def _dial(address: str) -> None:
    """Run an upstream process that is stopped later."""
    dialer = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1, patience=SECONDS))
    _answer(dialer.dial(address, 0, SECONDS))


@contextmanager
def _frozen(process: ForkServerProcess, end: GrpcLinkEnd) -> Iterator[None]:
    """Stop a process that answers, and send it more than the buffers in between can hold."""
    end.send(_message(1, 100))
    assert end.receive(SECONDS).header.step == 1
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    for index in range(40):
        end.send(_message(index, FRAME_BYTES))
    yield
    process.kill()
    process.join(SECONDS)


@pytest.mark.starts_processes
def test_a_frozen_listener_holds_nobody_who_is_told_to_wait_no_more() -> None:
    here, there = fork_server().Pipe()
    process = fork_server().Process(target=_listen, args=(there,), daemon=True)
    process.start()
    dialer = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1, patience=SECONDS))
    end = dialer.dial(here.recv(), 0, SECONDS)
    with _frozen(process, end), ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(end.receive, SECONDS)
        dialer.give_up(1, "the listener is silent")
        with pytest.raises(LinkClosed, match="the listener is silent"):
            waiter.result(SECONDS)
        end.close()
        dialer.close()


@pytest.mark.starts_processes
def test_a_frozen_dialer_holds_nobody_who_is_told_to_wait_no_more(stack: ExitStack) -> None:
    """Another process takes its slot while it is frozen."""
    server = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.target, seed=1, patience=SECONDS), expected=None)
    address = f"127.0.0.1:{server.listen('127.0.0.1:0')}"
    process = fork_server().Process(target=_dial, args=(address,), daemon=True)
    process.start()
    end = server.accept(SECONDS)
    with _frozen(process, end), ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(end.receive, SECONDS)
        above = StageLink(LinkSide(SPEC, Credentials("", "run"), SPEC.source, seed=1)).dial(address, 1, SECONDS)
        with pytest.raises(LinkClosed, match=r"home\.0 is at generation 1"):
            waiter.result(SECONDS)
        above.send(_message(3, 10))
        assert server.accept(SECONDS, 1).receive(SECONDS).header.step == 3
        above.abort("the test is over")
        server.close()
