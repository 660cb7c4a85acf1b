"""The check of a round by Gauntlet: tries drawn contributions on text, and looks for copies among all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from hetero_pp.config.audit import LEAST_SEQUENCES, GauntletSettings
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.sources import Source
from hetero_pp.messages.messages_pb2 import Judgement, RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.apply_round import FetchBlob
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, decode_blob, scale_of
from replica_groups.audit.gauntlet.losses import Texts, copy_of, losses_of
from replica_groups.audit.gauntlet.overlap import overlapping


def draw(secret: bytes, record_sha256: bytes, replicas: Iterable[str], count: int) -> list[str]:
    """Return `count` of the replicas, or all if they are fewer, in the order of their names.

    Every replica is equally likely in every round, also one that was drawn in the last one. A replica that knows that
    it will not be drawn could do no work.

    `record_sha256` is that of the round's record, so the draw is unknown before the contributions are fixed. `secret`
    is at least 16 bytes that are revealed after the run, so no contribution can be chosen by its draw. Deterministic.
    """
    ranks = {name: hashlib.sha256(b"\0".join((secret, record_sha256, name.encode()))).digest() for name in replicas}
    return sorted(sorted(ranks, key=lambda name: ranks[name])[:count])


def decoded(spec: RunSpec, record: RoundRecord, replica: str, fetch: FetchBlob) -> dict[str, DecodedTensor]:
    """Return a contribution as the round applies it, by name."""
    settings, found = spec.config.outer.compression, dict[str, DecodedTensor]()
    scale = scale_of(next(one for one in record.contributions if one.replica == replica))
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        address = BlobAddress(spec.run, record.round, replica, block)
        blob = decode_blob(fetch(replica, block), address, shapes, settings)
        found |= {name: tensor.scaled(scale) for name, tensor in blob.items()}
    return found


class GauntletCheck:
    """Judges contributions by losses. Implements RoundCheck."""

    def __init__(
        self, spec: RunSpec, settings: GauntletSettings, source: Source, secret: str, device: torch.device
    ) -> None:
        """`secret`: known to the validators alone; it decides which replicas are drawn, and on which text."""
        self._spec, self._settings, self._device = spec, settings, device
        self._secret = hashlib.sha256(f"audit {secret}".encode()).digest()
        self._texts = Texts(spec, source, settings.sequences or LEAST_SEQUENCES)

    def check(self, record: RoundRecord, theta: Mapping[str, Tensor], fetch: FetchBlob) -> Iterator[Judgement]:
        """Yield what was found about the contributions that a round includes. `theta` is from before the round."""
        outer = self._spec.at(record.round).outer
        sent = {one.replica: decoded(self._spec, record, one.replica, fetch) for one in record.contributions}
        on_device = {name: tensor.to(self._device) for name, tensor in theta.items()}
        rate = self._settings.step * outer.learning_rate_in(record.round)
        for pair in overlapping(sent, self._settings.overlap):
            seed = hashlib.sha256(b"pair" + self._secret + record.sha256 + " ".join(pair).encode()).digest()
            of_both = self._texts.of_pair(pair, record.round, np.random.default_rng(list(seed)))
            moved = {name: self._moved(sent[name]) for name in pair}
            copy = copy_of(pair, moved, on_device, self._spec.shape, of_both, rate, outer)
            if copy is not None:
                [original] = {*pair} - {copy}
                yield Judgement(round=record.round, replica=copy, copies=original)
        read = sum(one.tokens for one in record.contributions) // self._spec.config.data.sequence_length
        evaluated, sequences = self._settings.sizes(len(sent), read)
        for name in draw(self._secret, record.sha256, sent, evaluated):
            seed = hashlib.sha256(b"text" + self._secret + record.sha256 + name.encode()).digest()
            texts = self._texts.of(name, record.round, sequences, np.random.default_rng(list(seed)))
            losses = losses_of(on_device, self._moved(sent[name]), self._spec.shape, *texts, rate, outer)
            yield Judgement(round=record.round, replica=name, losses=losses)

    def finish(self) -> Iterator[Judgement]:
        """Yield nothing: each round is judged as it closes."""
        yield from ()

    def _moved(self, contribution: Mapping[str, DecodedTensor]) -> dict[str, DecodedTensor]:
        return {
            name: DecodedTensor(one.indices.to(self._device), one.values.to(self._device))
            for name, one in contribution.items()
        }
