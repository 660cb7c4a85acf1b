"""Predict what the exchange itself transfers, holds and computes in a round, from the settings alone.

Every contribution comes in once and goes out to every member that owns the same layers. With R replicas, R
contributions come in and R (R - 1) go out. `hetero_pp/simulator/traffic.py` has the closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetero_pp.config.lines import RELAYED, is_loopback
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.pseudo_gradient.contribution import kept_values
from hetero_pp.simulator.memory import (
    is_freed_at_once,
    memory_of_exchange,
    outer_moment_bytes,
    parameters_of_model,
    representatives,
)
from hetero_pp.simulator.traffic import (
    RINGS,
    checkpoint_bytes,
    exchange_bandwidth,
    exchange_calls,
    is_at_site_of_exchange,
    is_ring,
    line_of_exchange,
    message_bytes,
    outer_messages,
    replica_count,
    wire_bytes_of,
)
from hetero_pp.store.opening import folder_of

TRANSFER_SECONDS_A_GIGABYTE = 2.0
"""CPU seconds of a TLS stream, both ends: benchmarks/results/link_amd-epyc_2026-11-26.json, messages of 4 MiB."""
RELAY_SECONDS_A_GIGABYTE = 4.0
"""CPU seconds to relay traffic, both ends included: benchmarks/results/link_intel-xeon_2026-11-27.json, 4 MiB."""
CALL_SECONDS = 1.1e-3
"""CPU seconds of a call that submits or fetches blobs, beside their bytes: benchmarks/exchange_load.py, 2 to 8 members.

Half of what it took on an Intel Xeon, where everything else took twice the seconds given here, too.
"""
ROUND_SECONDS, MEMBER_SECONDS = 0.04, 0.004
"""CPU seconds to close and audit a round of the smallest model; for reports and hashes of a member: same benchmark."""
VALUE_SECONDS, POSITION_SECONDS = 10e-9, 30e-9
"""CPU seconds to decode a kept value, and to decode its position if not all are kept: the same benchmark."""
FRESH_SECONDS = 12e-9
"""CPU seconds per value to get memory from the system page by page, for tensors too large for the allocator to keep."""
AUDIT_SECONDS_A_PARAMETER = 3e-9
"""CPU seconds of the auditor's mean, outer step and sha256, beside decoding: the same benchmark."""
CHECKPOINT_SECONDS_A_GIGABYTE = 1.6  # CPU seconds to hash and write a run checkpoint: the same benchmark
DECODED_TIMES = 2  # a contribution is decoded when it arrives, and again by the auditor


@dataclass(frozen=True)
class Carried:
    """Bytes on the wire that the exchange receives and sends in a round."""

    received: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.received + other.received, self.sent + other.sent)

    def __mul__(self, times: float) -> Carried:
        return Carried(self.received * times, self.sent * times)


@dataclass(frozen=True)
class ExchangeLoad:
    """Predicted load of the exchange in one round."""

    way: str
    """Exchange of contributions: a value of `simulate.exchange` such as `gather`, or `store` for an object store."""
    contributions: Carried  # contributions that cross the exchange's line
    relayed: Carried | None
    """Messages of stage links that the exchange relays; None if the number of steps is not known."""
    relayed_links: int
    largest_checkpoint_bytes: int  # most bytes that a joining member fetches of the newest run checkpoint
    first_checkpoint_bytes: int  # bytes that all members together fetch when the run begins
    line: str | None  # kind of the line that the YAML gives the exchange; None if it gives none
    received_bits_a_second: float | None  # None means unlimited
    sent_bits_a_second: float | None
    memory_bytes: Mapping[str, float]
    cpu_seconds: Mapping[str, float]

    @property
    def carried(self) -> Carried:
        """Bytes that cross the line in a round."""
        return self.contributions + (self.relayed or Carried())

    @property
    def is_limited(self) -> bool:
        return self.received_bits_a_second is not None or self.sent_bits_a_second is not None

    def seconds(self, received_bits_a_second: float | None, sent_bits_a_second: float | None) -> Carried:
        """Return the seconds that the line needs for a round's bytes, in each direction; 0 if it is unlimited."""
        carried = self.carried
        return Carried(
            8 * carried.received / (received_bits_a_second or math.inf),
            8 * carried.sent / (sent_bits_a_second or math.inf),
        )


def exchange_load(spec: RunSpec, steps: Mapping[str, float] | None = None) -> ExchangeLoad:
    """Predict the load of the exchange in a round.

    Args: `steps` is the number of inner steps of each replica in a round, if `inner.steps` is not set.
    """
    config, line = spec.config, line_of_exchange(spec)
    simulate, url, parameters = config.simulate, config.store.url, parameters_of_model(spec)
    goes_by_store = url is not None and "://" in url and folder_of(url) is None
    gathered, elsewhere, largest, first, calls, members = Carried(), Carried(), 0, 0, 0.0, 0
    fragments = spec.fragments.count  # a round carries the mean over those of all fragments
    relayed_links, relayed_bytes, steps_are_known = 0, 0.0, True
    # A stage link is relayed if neither of its stages has an address and both may be on different hosts. They may be if
    # the exchange listens beyond this machine, or if the YAML says `relay`. Without TLS the exchange has no relay.
    spans_hosts = not config.exchange.insecure and not is_loopback(config.exchange.listen)
    for replica, count in representatives(spec):
        members += count * len(replica.members)
        for name in replica.members:
            member = spec.members[name]
            size = checkpoint_bytes(spec, member)
            largest, first = max(largest, size), first + size * count
            for round_ in range(1, fragments + 1):
                messages, share = outer_messages(spec, member, round_), count / fragments
                own = Carried(wire_bytes_of(messages["forward"]), wire_bytes_of(messages["backward"])) * share
                gathered += own
                elsewhere += Carried() if is_at_site_of_exchange(spec, member) else own
                if simulate.exchange != "gather" or goes_by_store:  # each blob has a call of its own
                    calls += share * sum(times for way in messages.values() for _, times in way)
                else:
                    calls += share * exchange_calls(spec, member, round_)
        if not isinstance(replica, ParticipantsReplica):
            continue
        listens = [replica.listen_of(stage) for stage in range(replica.stage_count)]
        hops = count * sum(
            all(one in (None, RELAYED) for one in both) and (spans_hosts or RELAYED in both)
            for both in pairwise(listens)
        )
        if hops:
            own_steps = (steps or {}).get(replica.name, spec.steps_of(replica.name))
            steps_are_known = steps_are_known and own_steps is not None
            sizes = message_bytes(spec, replica)
            batches = -(-config.data.validation_sequences // (replica.batch_size // replica.micro_batches))
            in_steps = (own_steps or 0) * replica.micro_batches * (sizes["activation"] + sizes["gradient"])
            relayed_links, relayed_bytes = (
                relayed_links + hops,
                relayed_bytes + hops * (in_steps + batches * sizes["evaluation"]),
            )
    way: str = simulate.exchange
    served = gathered  # includes members at the exchange's own site, because their streams use its CPU
    if is_ring(simulate):
        elsewhere = served = Carried()
        calls = 0.0
    elif goes_by_store:
        # Members transfer to and from the store themselves; the exchange and its auditor read every contribution to
        # check it.
        way, elsewhere = "store", Carried(received=DECODED_TIMES * gathered.received)
        served = elsewhere
    relayed = Carried(relayed_bytes, relayed_bytes) if steps_are_known else None
    decoding = 0.0  # CPU seconds of one contribution
    for shape in spec.parameter_shapes.values():
        values, is_dense = kept_values(shape, config.outer.compression), config.outer.compression.density == 1
        each = VALUE_SECONDS + (0.0 if is_dense else POSITION_SECONDS)
        decoding += values * (each + (FRESH_SECONDS if is_freed_at_once(values) else 0.0)) / fragments
    checkpoint = (4 + outer_moment_bytes(config)) * parameters / config.checkpoints.every
    cpu_seconds = {
        "transfer": (served.received + served.sent) / 1e9 * TRANSFER_SECONDS_A_GIGABYTE,
        "calls": calls * CALL_SECONDS,
        "relay": (relayed or Carried()).received / 1e9 * RELAY_SECONDS_A_GIGABYTE,
        "decoding": 0.0 if way in RINGS else DECODED_TIMES * replica_count(spec) * decoding,
        "members": MEMBER_SECONDS * members,
        "audit": ROUND_SECONDS + AUDIT_SECONDS_A_PARAMETER * parameters / fragments,
        "checkpoints": checkpoint / 1e9 * CHECKPOINT_SECONDS_A_GIGABYTE,
    }
    return ExchangeLoad(
        way=way,
        contributions=elsewhere,
        relayed=relayed,
        relayed_links=relayed_links,
        largest_checkpoint_bytes=largest,
        first_checkpoint_bytes=first,
        line=None if line is None else line.kind,
        received_bits_a_second=exchange_bandwidth(spec, "forward"),
        sent_bits_a_second=exchange_bandwidth(spec, "backward"),
        memory_bytes=memory_of_exchange(spec, members, relayed_links, way).held(),
        cpu_seconds=cpu_seconds,
    )
