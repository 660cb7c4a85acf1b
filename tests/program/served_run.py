"""A run to which hosts come with tickets, whose exchange is in the process of the test."""

from __future__ import annotations

import io
import time
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

from members import TIMEOUT

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.shared import own_configuration, told_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.program.join.invite import invite
from hetero_pp.program.join.membership import Membership, take_slot
from hetero_pp.rpc.identities import Secret, Ticket, make_ticket, new_secret
from hetero_pp.rpc.relay import MeetingPoint
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.host import make_exchange
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom

CONFIG = """name: homes
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
outer: {rounds: 3}
exchange: {listen: "127.0.0.1:PORT"}
lines: {dsl: {up: 10 Mbit/s, down: 50 Mbit/s}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: {count: 2, line: dsl}, batch_size: 4, boundary: {rank: 8}}
"""
HOUR = 3600.0


class Served:
    """A run that this process serves over gRPC and TLS, and its folder as `serve` writes it."""

    def __init__(self, folder: Path, corpus: Path, stack: ExitStack) -> None:
        self.secret, self.corpus = Secret(new_secret()), corpus
        run = self.folder = RunFolder(folder / "runs" / "homes")
        run.path.mkdir(parents=True)
        run.config.write_text(CONFIG.replace("CORPUS", str(corpus)).replace("PORT", "0"))
        run.token.write_text(self.secret.text)
        self.config = ConfigFile(run.config).config
        self.spec = RunSpec(self.config, 256)
        self.exchange, self.memberships = make_exchange(self.spec, run), Memberships(run.memberships)
        self.waiting_room = WaitingRoom({}, group_spares)
        told = RunForGuests(*told_of(self.config), self.spec.shape.vocabulary)
        self.house = OpenHouse(self.memberships, told, self.waiting_room, self.spec.unnamed_slots)
        self.address = self.serve(stack, self.house)
        stack.callback(self.memberships.close)
        self.tokens = prepare_tokens(DataSettings(corpus=str(corpus)), folder / "encoded").digest

    def serve(self, stack: ExitStack, house: OpenHouse | None) -> str:
        """Serve the exchange at a further port; return its address."""
        self.meeting_point = MeetingPoint("127.0.0.1:0")
        stack.callback(self.meeting_point.close)
        server, port = serve_exchange(
            self.exchange,
            self.secret,
            "127.0.0.1:0",
            encrypted=True,
            open_house=house,
            meeting_point=self.meeting_point,
        )
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        return f"127.0.0.1:{port}"

    @property
    def runs(self) -> Path:
        return self.folder.path.parent

    def invite(self, slot: str | None, seconds: float = HOUR) -> str:
        """Return the ticket that `hetero-pp invite` prints."""
        with redirect_stdout(io.StringIO()) as out:
            invite(self.runs, "homes", slot, seconds, self.address)
        return out.getvalue()

    def ticket(self, slot: str | None = None, seconds: float = 2 * HOUR, address: str = "") -> str:
        found = self.memberships.invite(slot, seconds)
        until = time.time() + seconds
        return make_ticket("homes", address or self.address, self.secret.authority, found, until, "any").to_text()

    def joined(self, ticket: str, runs: Path) -> Membership:
        """Take a slot as `join` does, up to the start of the member."""
        found = take_slot(Ticket.from_text(ticket), runs.absolute(), lambda _: None)
        config = own_configuration(found.configuration, found.slot, str(self.corpus), None)
        save_config(config, runs.absolute() / "homes" / f"config-{found.slot}.yaml")
        return found
