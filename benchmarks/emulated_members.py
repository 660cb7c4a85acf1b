"""Members of an exchange that compute nothing: each makes the calls of a real one, over a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.messages.messages_pb2 import BlobHeader, InnerStep, Report, RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.step import OuterOptimizer, parameter_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, batches, blob_of, encode_tensor, join_blobs
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret, SecretKeys

SECONDS_BETWEEN_HEARTBEATS = 1.0


class Members:
    """Emulated members that share a process."""

    def __init__(self, spec: RunSpec, names: Sequence[str], address: str, keys: SecretKeys) -> None:
        self.spec, self.names = spec, names
        self.clients = {name: ExchangeClient(address, keys.of(name)) for name in names}
        self.theta: dict[str, torch.Tensor] = {}
        self.encoded = dict(_encoded(spec))
        self.generations: dict[str, int] = {}
        self.records: dict[str, RoundRecord] = {}
        self.blobs: dict[str, dict[str, bytes]] = {}
        self.fetched: dict[tuple[str, str], bytes] = {}
        self.n_bytes = 0
        self._ended = threading.Event()
        self._heartbeats = threading.Thread(target=self._heartbeat, daemon=True)

    def join(self, name: str, round_: int) -> None:
        """Agree on the configuration, and take the slot."""
        client = self.clients[name]
        client.agree(name, self.spec.agreed)
        client.join(name, "")

    def begin(self) -> None:
        """Read theta once for all members, and send heartbeats from now on."""
        self.theta = self.clients[self.names[0]].checkpoint(list(self.spec.parameter_shapes))
        self._heartbeats.start()

    def assign(self, name: str, round_: int) -> None:
        work = self.clients[name].assign(name, round_ - 1)
        assert work.round == round_, f"{name} was assigned round {work.round}, expected {round_}"
        self.generations[name] = work.generation

    def encode(self, round_: int) -> None:
        """Write what each member contributes to a round: the same tensors under the member's name."""
        compression = self.spec.config.outer.compression
        for name in self.names:
            self.blobs[name] = {
                block: blob_of(BlobAddress(self.spec.run, round_, name, block), tensors, compression)
                for block, tensors in self.encoded.items()
            }

    def report(self, name: str, round_: int) -> None:
        """Report the inner steps."""
        steps = (InnerStep(replica=name, round=round_, step=step, loss=5.0) for step in range(self.spec.inner_steps))
        reports = [Report(time=time.time(), member=name, sent=time.time(), inner_step=one) for one in steps]
        self.clients[name].report(reports, name)

    def deposit(self, name: str, round_: int) -> None:
        generation, steps = self.generations[name], self.spec.inner_steps
        common = BlobHeader(round=round_, replica=name, generation=generation, steps=steps)
        for batch in batches(self.blobs[name].items()):
            self.clients[name].deposit_blob(*join_blobs(common, batch), Caller(name))

    def record(self, name: str, round_: int) -> None:
        self.records[name] = self.clients[name].record(round_, name)

    def fetch(self, name: str, round_: int) -> None:
        """Fetch the contributions of all others in the order of a real member, and keep those of the first member."""
        n_bytes, is_first = 0, name == self.names[0]
        for block in self.encoded:
            for entry in self.records[name].contributions:
                if entry.replica == name and not is_first:
                    continue
                data = self.clients[name].fetch(name, round_, entry.replica, block)
                n_bytes += len(data)
                if is_first:
                    self.fetched[entry.replica, block] = data
        self.n_bytes += n_bytes

    def apply(self, round_: int) -> None:
        """Apply the round once for all members."""
        record, own = self.records[self.names[0]], OuterOptimizer(self.spec.config.outer)
        apply_round(self.theta, self.spec.run, record, lambda *which: self.fetched[which], own)
        self.hashes = {name: parameter_sha256(tensor) for name, tensor in self.theta.items()}

    def confirm(self, name: str, round_: int) -> None:
        self.clients[name].confirm(name, round_, self.hashes)

    def finish(self, name: str, round_: int) -> None:
        report = Report(time=time.time(), member=name)
        report.finished.SetInParent()
        self.clients[name].report([report], name)

    def close(self) -> None:
        self._ended.set()
        for client in self.clients.values():
            client.close()

    def _heartbeat(self) -> None:
        heartbeats = 0
        while not self._ended.wait(SECONDS_BETWEEN_HEARTBEATS):
            for name, client in self.clients.items():
                heartbeats += 1
                try:
                    client.heartbeat(name, None, self.generations.get(name, 0), heartbeats)
                except HeteroPPError:
                    if self._ended.is_set():
                        return


def _encoded(spec: RunSpec) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...], bytes]]]]:
    """Yield what every member sends of each block, in each round: selected from random values, and encoded."""
    generator, compression = torch.Generator().manual_seed(1), spec.config.outer.compression
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        found = []
        for name, shape in shapes.items():
            delta = torch.randn(shape, generator=generator) * 1e-3
            found.append(
                (name, shape, encode_tensor(shape, select(torch.zeros(shape), delta, compression), compression))
            )
        yield block, found


def run_members(pipe: Connection, folder: Path, names: Sequence[str], address: str, secret: str) -> None:
    """Carry out the steps that the other end of the pipe names, each by all members at once."""
    spec = read_run(RunFolder(folder))
    members = Members(spec, names, address, SecretKeys(Secret(secret), encrypted=False))
    pipe.send(0)
    with ThreadPoolExecutor(len(names)) as pool:
        for step, round_ in iter(pipe.recv, None):
            of_all = getattr(members, step)
            if step in ("begin", "encode", "apply", "close"):
                of_all(*([round_] if step in ("encode", "apply") else []))
            else:
                list(pool.map(of_all, names, [round_] * len(names)))
            pipe.send(members.n_bytes)
