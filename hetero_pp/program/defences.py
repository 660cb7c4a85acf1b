"""Defences against hostile replicas that a run has without a line in its YAML, and their price if it has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetero_pp.config.audit import FEWEST_REPLICAS, OFF, PARAMETERS, TEXTS, GauntletSettings
from hetero_pp.config.lines import is_loopback
from hetero_pp.config.run_config import RunConfig, check_scores
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes, format_count, format_flops
from hetero_pp.data.settings import INSTALLED
from replica_groups.audit.gauntlet import share_of_compute
from replica_groups.audit.replica_scores import require_openskill

MOST_FLOP = 2e12  # trials of a round beside the exchange that are done by default: about a minute of one core

PRICE = "One hostile replica of four can then end 20 rounds at a loss of 8.63 instead of 4.88 (docs/audit.md)"
"""Measured: rows `flip by 4` of the table audit/one_of_four, at three seeds."""

_COPIES = 3
"""Copies of the parameters in the memory of a validator: those before the round, the model, and contributions."""


def defended(spec: RunSpec, is_served: bool) -> RunSpec:
    """Return the run with the defences that it has by default, if other hosts may join it.

    `is_served`: the exchange or a member starts alone. Then others do, too, perhaps by tickets.
    """
    config = spec.config
    is_open = is_served or _others_may_join(config)
    if config.audit.gauntlet is not None or not is_open or len(config.replicas) < FEWEST_REPLICAS:
        return spec
    if config.rehearsal is not None:
        return spec
    own = GauntletSettings() if why_no_scores(spec) is None else GauntletSettings(evaluated=0)
    audit = config.audit.model_copy(update={"gauntlet": own})
    return RunSpec(config.model_copy(update={"audit": audit}), spec.shape.vocabulary)


def _others_may_join(config: RunConfig) -> bool:
    return any(one.optional for one in config.replicas) or not is_loopback(config.exchange.listen)


def why_no_scores(spec: RunSpec) -> str | None:
    """Return why a run has no scores by default; None if it has them."""
    config = spec.config
    try:
        check_scores(config.outer)
        require_openskill()
    except ConfigError as error:
        return error.message
    if config.data.corpus not in INSTALLED and not Path(config.data.streamed or config.data.corpus).exists():
        return "this host does not have the corpus"
    sizes = GauntletSettings().sizes(len(config.replicas), _sequences(spec))
    passes = sizes.evaluated * sizes.sequences * TEXTS * PARAMETERS
    flop = 2 * passes * config.data.sequence_length * spec.parameter_count
    if flop > MOST_FLOP:
        return f"the trials of a round would take {format_flops(flop)} beside the exchange"
    return None


def defence_lines(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each audit of a run, or the price of having none."""
    audit, replicas = spec.config.audit, spec.config.replicas
    where = "beside the exchange" if audit.by == "exchange" else "by each `hetero-pp audit validate`"
    if (compares := audit.compares) is not None and compares.agreement is not None:
        yield "Signs: compared before a round closes, which leaves out a contribution that goes against the others"
    if (scores := audit.scores) is not None:
        evaluated, sequences = scores.sizes(len(replicas), _sequences(spec))
        memory = 4 * _COPIES * spec.parameter_count
        tried = format_count(evaluated, "contribution")
        costs = f"{format_bytes(memory)} of memory"
        if read := _sequences(spec):  # in rounds of a fixed time nobody knows it before
            costs = f"{100 * share_of_compute(scores, len(replicas), read):.2g} % of the replicas' compute, and {costs}"
        yield f"Scores: {tried} of each round tried {where}, on 2 x {sequences} sequences: {costs}"
    elif compares is not None:
        why = why_no_scores(spec) or "`audit.gauntlet.evaluated` is 0"
        yield f"Scores: none, because {why}. A replica that does no work, or copies, may not be found"
    if audit.recompute is not None:
        yield f"Recomputation: {100 * audit.recompute.share:.2g} % of the replicas' rounds are computed again {where}"
    if audit.gauntlet == OFF:
        yield f"Defences: off (`audit.gauntlet`). {PRICE}"
    elif audit.gauntlet is None and _others_may_join(spec.config):
        count = format_count(len(replicas), "replica")
        yield f"Defences: none by default with {count}: nobody can tell which of two lies"


def _sequences(spec: RunSpec) -> int:
    """Return the sequences that all replicas train on in a round; 0 with rounds of a fixed time."""
    return sum((spec.steps_of(replica.name) or 0) * replica.batch_size for replica in spec.config.replicas)
