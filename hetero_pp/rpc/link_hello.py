"""The first frame of each direction of a stage link: who is there, and whether they belong here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError

from hetero_pp.messages.messages_pb2 import LinkHello
from hetero_pp.rpc.channels import PROTOCOL_VERSION

_MAX_HELLO_BYTES = 4096


def make_hello(run: str, link: str, sender: str, epoch: int) -> bytes:
    """The first frame of this member."""
    return LinkHello(version=PROTOCOL_VERSION, run=run, link=link, sender=sender, epoch=epoch).SerializeToString()


def first_frame(frames: Iterator[bytes], timeout: float, cancel: Callable[[], object]) -> bytes:
    """The first frame of a stream, which is cancelled if that does not come in time (grpc.RpcError)."""
    timer = threading.Timer(timeout, cancel)
    timer.daemon = True
    timer.start()
    try:
        return next(frames, b"")
    finally:
        timer.cancel()


def judge(frame: bytes, run: str, link: str, sender: str) -> tuple[LinkHello, str | None]:
    """Who says hello, and why not to talk to them (None: they are who we wait for). Epochs are not looked at."""
    if len(frame) > _MAX_HELLO_BYTES:
        return LinkHello(), f"found a hello of {len(frame)} bytes, expected at most {_MAX_HELLO_BYTES}"
    try:
        hello = LinkHello.FromString(frame)
    except DecodeError:
        return LinkHello(), f"found {len(frame)} bytes that are no hello"
    wanted = {"version": PROTOCOL_VERSION, "link": link, "sender": sender}
    for name, value in wanted.items():
        if getattr(hello, name) != value:
            return hello, f"found {name} {getattr(hello, name)}, expected {value}"
    if hello.run != run:  # the run's identifier is what a stranger does not know, so it is not told
        return hello, "found the identifier of another run"
    return hello, None
