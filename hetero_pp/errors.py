"""Every error this program raises on purpose.

HeteroPPError
├── AskAgain               an answer takes longer than a call may
├── ConfigError            a YAML, a corpus or a tokenizer that cannot be used: the user can mend it
├── DamagedFile            a file of a run that is not what was written
├── LinkError
│   ├── LinkClosed         the other end is gone (a dead peer)
│   │   └── ExchangeLost   the exchange is gone, or was for a moment
│   └── LinkTimeout        nothing came in time (a slow link, or a peer that hangs)
├── MalformedMessage       bytes from the network that no honest peer sends
│   └── MalformedContribution
├── Refused                the exchange refused a request: wrong run, wrong round
│   ├── Forbidden          what is not the caller's to ask, or to tell
│   ├── NewRun             the exchange is of a later run than this process
│   └── WrongToken         a stranger's: without a token of the run
├── ReplicasDiffer         two holders of one parameter do not hold the same bits
├── RunOver                every round is closed: there is nothing left to train
├── Stopped                this process was asked to save its state and end
├── StoreError             the store of a run cannot be read or written: it may be tried again
├── TermOver               somebody else holds this member's place, or will: it has to join again
├── Suspended              the member's replica has to be formed anew, and train the round again
├── TooMuch                a caller has more open, or unread, than it may
└── RunFailed              some other member of the run failed; this one only stops
"""

from __future__ import annotations

from collections.abc import Sequence


class HeteroPPError(Exception):
    """Base of all errors below."""


class AskAgain(HeteroPPError):
    """What a call waits for has not happened in the time that a call may take: it is made again."""


class ConfigError(HeteroPPError):
    """Input that the user can mend.

    `key` is the path of the offending setting, such as ("replicas", 1, "boundary", "rank"); the loader turns it
    into a file and a line.
    """

    def __init__(self, key: Sequence[str | int], message: str) -> None:
        self.key = tuple(key)
        self.message = message
        super().__init__(f"{dotted(key)}: {message}" if key else message)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Sequence[str | int], str]]:
        """An error of a worker process arrives where it is waited for."""
        return type(self), (self.key, self.message)


class DamagedFile(HeteroPPError):
    """A file of a run that is not what was written; the text names it."""


class LinkError(HeteroPPError):
    """A link between two members cannot be used."""


class LinkClosed(LinkError):
    """The other end of a link is gone."""


class ExchangeLost(LinkClosed):
    """The connection to the exchange broke; it may be there again, and not know what it was told."""


class LinkTimeout(LinkError):
    """Nothing arrived on a link within its time limit."""


class MalformedMessage(HeteroPPError):
    """Bytes from the network that do not follow the wire format."""


class MalformedContribution(MalformedMessage):
    """A contribution that cannot be decoded to valid values."""


class Refused(HeteroPPError):
    """The exchange refused a request; the text says why."""


class Forbidden(Refused):
    """A request of a member, or of who has started it, that is another's to make."""


class NewRun(Refused):
    """The exchange at an address belongs to a later run than this process. Not verified: anyone could answer there."""


class WrongToken(Refused):
    """A request without a token of the run."""


class ReplicasDiffer(HeteroPPError):
    """Two replicas hold different bits for one parameter after an outer round."""


class RunOver(HeteroPPError):
    """Every round of the run is closed: there is nothing left to train."""

    @classmethod
    def after(cls, round_: int, rounds: int) -> RunOver:
        """With the sentence that a user is shown."""
        return cls(f"the run is over (round {round_} of {rounds}); nothing was left to train")


class Stopped(HeteroPPError):
    """This process was asked to save its state and end."""

    def __init__(self, text: str = "it was asked to stop") -> None:
        super().__init__(text)


class StoreError(HeteroPPError):
    """The place where a run keeps things cannot be read or written; the text names the object, and why."""


class TermOver(HeteroPPError):
    """A member's term is over: what it sends changes nothing, until it has joined again."""


class Suspended(HeteroPPError):
    """A member of the replica is gone: the others return to the start of the round, until it is formed anew."""


class TooMuch(HeteroPPError):
    """A caller has more calls open, or more that it has not read, than one may have."""


class RunFailed(HeteroPPError):
    """Another member of the run failed, so this one stops."""


def dotted(key: Sequence[str | int]) -> str:
    """("replicas", 1, "kind") -> "replicas[1].kind"."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
