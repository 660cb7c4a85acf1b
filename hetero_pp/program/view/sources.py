"""Where the page gets its runs from."""

from __future__ import annotations

from typing import Any, Protocol

from hetero_pp.program.view.run_view import RunView


class Source(Protocol):
    """A run or a prediction on the page."""

    @property
    def view(self) -> RunView | None:
        """The run as far as it is known; None for a prediction alone. It is replaced when the run begins anew."""

    @property
    def prediction(self) -> dict[str, Any] | None:
        """The prediction of one step; None if there is none."""

    def start(self) -> None:
        """Begin to follow the run."""

    def wait(self, seconds: float) -> bool:
        """Wait until what is known already has been read; return whether it has."""

    def close(self) -> None:
        """Stop."""
