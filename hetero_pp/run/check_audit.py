"""Checks of the settings of audits that need the whole configuration."""

from __future__ import annotations

from hetero_pp.config.audit import AuditSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.outer.methods import OuterSettings


def check_audit(audit: AuditSettings, outer: OuterSettings, inner: InnerSettings, data: DataSettings) -> None:
    """Raise ConfigError for an audit that cannot work with the rest of the configuration."""
    if outer.weights == "scores" and audit.gauntlet is None:
        raise ConfigError(("outer", "weights"), "found `scores` without scores, expected `audit.gauntlet`, too")
    if audit.by == "validators" and audit.gauntlet is None and audit.recompute is None:
        raise ConfigError(
            ("audit", "by"), "found nothing to audit, expected `audit.gauntlet` or `audit.recompute`, too"
        )
    if audit.gauntlet is None:
        return
    key = ("audit", "gauntlet")
    if outer.source == "gradient":
        found = f"found it with method {outer.method}, expected `outer.source: difference`"
        raise ConfigError(key, f"{found}: the gradient of one step tells too little")
    if inner.steps is None:
        found = "found it with `inner.seconds`, expected `inner.steps`"
        raise ConfigError(key, f"{found}: the text that a replica trained on is not known otherwise")
    if data.streamed is not None:
        found = "found it with a streamed corpus, expected one that is encoded once"
        raise ConfigError(key, f"{found}: a validator cannot read a stream at any place")
