"""Every error that this program raises on purpose.

HeteroPPError
├── AskAgain               an answer takes longer than a call may
├── ConfigError            a YAML, a corpus or a tokenizer that cannot be used: the user can correct it
├── DamagedFile            a file of a run that is not as written
├── LinkError
│   ├── LinkClosed         the other end is gone (a dead peer)
│   │   ├── ExchangeLost   the exchange is gone, at least for a moment
│   │   └── PeerAtFault    the other end sent a message that no honest stage sends
│   └── LinkTimeout        nothing arrived in time (a slow link, or a peer that hangs)
├── MalformedMessage       bytes from the network that no honest peer sends
│   ├── InvalidRequest     a request that is too long, or cannot be parsed
│   └── MalformedContribution
├── OutOfMemory            the memory of a member's device does not suffice
├── Refused                the exchange refused a request: wrong run, wrong round
│   ├── Forbidden          the caller may not make this request or report
│   ├── NewRun             the exchange belongs to a later run than this process
│   └── WrongToken         the caller has no token of the run
├── ReplicasDiffer         two holders of one parameter have different bits
├── RunOver                every round is closed: nothing is left to train
├── Stopped                this process was asked to save its state and end
├── StoreError             the store of a run cannot be read or written: it may be retried
├── IncarnationOver               this member's incarnation is over: another process holds its slot, or will
├── Suspended              the member's replica must be formed again, and repeat the round
├── TooMuch                a caller has more open, or unread, than it may
└── RunFailed              another member of the run failed; this one only stops
    ├── TakenOver          another host serves the run
    └── GivenUp            no process of this host is left, and none is started again
"""

from __future__ import annotations

from collections.abc import Sequence


class HeteroPPError(Exception):
    """Base of all errors below."""


class AskAgain(HeteroPPError):
    """The event that a call waits for did not happen within the call's time limit; the caller calls again."""


class ConfigError(HeteroPPError):
    """Input that the user can correct.

    `key` is the path of the setting at fault, such as ("replicas", 1, "boundary", "rank"). The loader turns it into a
    file and a line.
    """

    def __init__(self, key: Sequence[str | int], message: str) -> None:
        self.key = tuple(key)
        self.message = message
        super().__init__(f"{dotted(key)}: {message}" if key else message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Sequence[str | int], str]]:
        """Pickle by key and message, so that an error of a worker process arrives intact."""
        return type(self), (self.key, self.message)


class DamagedFile(HeteroPPError):
    """A file of a run is not as written; the message names it."""


class LinkError(HeteroPPError):
    """A link between two members cannot be used."""


class LinkClosed(LinkError):
    """The other end of a link is gone."""


class ExchangeLost(LinkClosed):
    """The connection to the exchange broke. It may come back, and may have forgotten what it was told."""


class PeerAtFault(LinkClosed):
    """The other end of a link sent a message that no honest stage sends, so this end closed the link."""

    def __init__(self, peer: str, message: str) -> None:
        """`peer`: the member at the other end."""
        self.peer = peer
        super().__init__(message)


class LinkTimeout(LinkError):
    """Nothing arrived on a link within its time limit."""


class MalformedMessage(HeteroPPError):
    """Bytes from the network do not follow the wire format."""


class InvalidRequest(MalformedMessage):
    """A request is longer than any in its run, or cannot be parsed: its sender is at fault, whatever it says."""


class MalformedContribution(MalformedMessage):
    """A contribution cannot be decoded to valid values."""


class OutOfMemory(HeteroPPError):
    """The memory of a member's device does not suffice. It would not suffice after a restart either."""


class Refused(HeteroPPError):
    """The exchange refused a request; the message says why."""


class Forbidden(Refused):
    """A member, or the launcher that started it, made a request that only another may make."""


class NewRun(Refused):
    """The exchange at an address belongs to a later run than this process. Not verified: anyone could answer there."""


class WrongToken(Refused):
    """A request came without a token of the run."""


class ReplicasDiffer(HeteroPPError):
    """Two replicas hold different bits for one parameter after an outer round."""


class RunOver(HeteroPPError):
    """Every round of the run is closed: nothing is left to train."""

    @classmethod
    def after(cls, round_: int, rounds: int) -> RunOver:
        """Return the error with the message for users."""
        return cls(f"the run is over (round {round_} of {rounds}); no round was left to train")


class Stopped(HeteroPPError):
    """This process was asked to save its state and end."""

    def __init__(self, text: str = "it was stopped on request") -> None:
        super().__init__(text)


class StoreError(HeteroPPError):
    """The store of a run cannot be read or written; the message names the object and the reason."""


class IncarnationOver(HeteroPPError):
    """A member's incarnation is over: its messages have no effect until it has joined again."""


class Suspended(HeteroPPError):
    """A member of the replica is gone.

    The others return to the start of the round until the replica is formed again.
    """


class TooMuch(HeteroPPError):
    """A caller has more open calls, or more unread data, than it may have."""


class RunFailed(HeteroPPError):
    """Another member of the run failed, so this one stops."""


class GivenUp(RunFailed):
    """Every process of this host has ended, and a restart would not help, or none is left."""


class TakenOver(RunFailed):
    """Another host serves the exchange of the run now, or may: this one stops, and its members go to the other."""


def dotted(key: Sequence[str | int]) -> str:
    """Format a key: ("replicas", 1, "kind") -> "replicas[1].kind"."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
