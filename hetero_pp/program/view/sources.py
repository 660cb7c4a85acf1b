"""Where the page gets its runs from."""

from __future__ import annotations

from typing import Any, Protocol

from hetero_pp.program.view.run_view import RunView


class Source(Protocol):
    """A run or a prediction on the page."""

    @property
    def view(self) -> RunView | None:
        """What is known of the run; None for a prediction alone. Another object follows once the run began anew."""

    @property
    def prediction(self) -> dict[str, Any] | None:
        """What the simulator predicts for one step; None if it was not asked."""

    def start(self) -> None:
        """Begin to follow the run."""

    def wait(self, seconds: float) -> bool:
        """Wait until what is known already has been read; return whether it has."""

    def close(self) -> None:
        """Stop."""
