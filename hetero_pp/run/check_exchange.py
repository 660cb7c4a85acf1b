"""Checks across the settings of the exchange: when a round closes, and how long it waits for members."""

from __future__ import annotations

from hetero_pp.config.topology import ExchangeSettings, GraceSettings, HangSettings, LeaseSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_seconds


def check_exchange(exchange: ExchangeSettings) -> None:
    """Raise ConfigError for bounds that contradict each other."""
    windows: dict[str, GraceSettings | LeaseSettings | HangSettings] = {
        "grace": exchange.grace,
        "lease": exchange.lease,
        "hang": exchange.hang,
    }
    for name, window in windows.items():
        if window.least > window.most:
            raise ConfigError(
                ("exchange", name, "least"),
                f"found {format_seconds(window.least)}, expected at most the {format_seconds(window.most)} of "
                f"`exchange.{name}.most`",
            )
    if exchange.grace.most > exchange.limit:
        raise ConfigError(
            ("exchange", "grace", "most"),
            f"found {format_seconds(exchange.grace.most)}, expected at most the {format_seconds(exchange.limit)} of "
            "`exchange.limit`, after which a round closes",
        )
    magnitudes = exchange.magnitudes
    if magnitudes.scale > magnitudes.leave_out:
        raise ConfigError(
            ("exchange", "magnitudes", "scale"),
            f"found {magnitudes.scale:g}, expected at most the {magnitudes.leave_out:g} of "
            "`exchange.magnitudes.leave_out`",
        )
