"""A run whose members are threads, over gRPC to the exchange and to neighbours, each on a device that a test names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from members import TIMEOUT

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Secret, new_secret
from replica_groups.audit.commitments import audited_member
from replica_groups.audit.in_exchange import audited
from replica_groups.engines.ranks import Ranks
from replica_groups.exchange.host import begin_run, make_exchange
from replica_groups.exchange.server import serve_exchange
from replica_groups.member.take_part import take_part


@dataclass(frozen=True)
class Ran:
    """A run that is over."""

    reports: list[Report]
    devices: dict[str, str]
    """Member -> device, as `status` reports it."""
    errors: dict[str, Exception]
    """Errors of members without which the run went on."""


def run_over_grpc(
    spec: RunSpec,
    folder: Path,
    devices: Mapping[str, torch.device],
    several: Mapping[str, tuple[torch.device, ...]] = MappingProxyType({}),
) -> Ran:
    """Train all rounds. Raises the first error of a member if the run fails.

    `several`: all devices of a stage whose layers lie on several.
    """
    own, secret, errors = RunFolder(folder), Secret(new_secret()), dict[str, Exception]()
    exchange = audited(make_exchange(spec, own), spec)
    server, port = serve_exchange(exchange, secret, "127.0.0.1:0", encrypted=False)

    def take(name: str) -> None:
        """Take part as a process of its own does."""
        torch.set_num_threads(1)
        credentials, member = secret.credentials(name, encrypted=False), spec.members[name]
        try:
            with NetworkConnections(spec, member, f"127.0.0.1:{port}", credentials, Lines()) as connections:
                try:
                    ranks = Ranks(device=devices[name], devices=several.get(name, ()))
                    take_part(spec, member, connections, own, ranks, audited=audited_member)
                except HeteroPPError as error:
                    connections.report_failure(str(error), isinstance(error, LinkError | RunFailed))
                    raise
        except Exception as error:  # noqa: BLE001 (raised by the caller)
            errors[name] = error
            if not isinstance(error, HeteroPPError):
                exchange.fail(f"{name}: {error}")

    threads = [threading.Thread(target=take, args=(name,), name=name, daemon=True) for name in spec.members]
    for thread in threads:
        thread.start()
    try:
        auditor = begin_run(exchange, spec, own, None)
        exchange.wait_until_finished()
        auditor.join()
        named = {slot.name: slot.device for slot in exchange.status().slots}
    except RunFailed as error:
        raise next(iter(errors.values()), error) from None
    finally:
        for thread in threads:
            thread.join(TIMEOUT)
        exchange.end_watching()
        server.stop(None).wait(TIMEOUT)
    return Ran(list(exchange.watch()), named, errors)
