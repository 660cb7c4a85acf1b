"""Checks of the settings of audits that need the whole configuration.

With `audit.recompute`, every replica's round can be computed again in one process, from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_pp.config.audit import AuditSettings
from hetero_pp.config.topology import DatacenterReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.inner import InnerSettings
from hetero_pp.outer.methods import OuterSettings

_WITH = "with `audit.recompute`"


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


def check_recomputed(outer: OuterSettings, replicas: Sequence[ReplicaSettings], undo: bool) -> None:
    """Raise ConfigError for settings with which a round does not follow from theta and a member's checkpoint alone."""
    if outer.overlap:
        found = f"found {outer.overlap:g} {_WITH}, expected 0"
        raise ConfigError(("outer", "overlap"), f"{found}: a round then starts before the one before is decided")
    if outer.keep_local:
        found = f"found true {_WITH}, expected false"
        raise ConfigError(("outer", "keep_local"), f"{found}: an excluded replica then starts from its own parameters")
    if outer.source == "gradient":
        found = f"found `{outer.method}` {_WITH}, expected a method that averages differences"
        raise ConfigError(("outer", "method"), f"{found}: a checkpoint for every step would cost more than the step")
    if not undo:
        found = f"found false {_WITH}, expected true"
        raise ConfigError(("states", "undo"), f"{found}: a repeated round would start with other moments")
    for index, replica in enumerate(replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            found = f"found `{replica.engine}` for {replica.name} {_WITH}, expected `torch`"
            why = "the bits of several ranks cannot be computed again in one process"
            raise ConfigError(("replicas", index, "engine"), f"{found}: {why}")
