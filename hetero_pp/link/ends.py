"""What joins a stage to its neighbours: an end of the link to the stage before, one of the link to the stage after."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_pp.link.protocol import LinkEnd

Holders = tuple[int | None, int | None]
"""Holder numbers of the stages before and after, as in Assignment."""
NOT_KNOWN: Holders = (None, None)


@dataclass(frozen=True)
class LinkEnds:
    """None where there is no neighbour: at a group's first and last stage, and in a replica that is not cut up."""

    upstream: LinkEnd | None = None
    downstream: LinkEnd | None = None

    @property
    def both(self) -> list[LinkEnd]:
        """Those that there are."""
        return [end for end in (self.upstream, self.downstream) if end is not None]

    def close(self) -> None:
        """See LinkEnd."""
        for end in self.both:
            end.close()

    def abort(self, cause: str) -> None:
        """See LinkEnd."""
        for end in self.both:
            end.abort(cause)
