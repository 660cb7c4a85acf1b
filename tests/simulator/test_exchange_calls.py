"""Calls in which blobs cross, as predicted and as members make them over gRPC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grpc_threads import run_over_grpc

from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.pseudo_gradient import contribution
from hetero_pp.simulator import traffic
from hetero_pp.simulator.traffic import blob_sizes, exchange_calls
from replica_groups.exchange import decided, server

YAML = """\
name: calls
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, tokenizer: bytes, sequence_length: 32, validation_share: 0.2, validation_sequences: 4}
inner: {steps: 1}
outer: {rounds: 2, compression: {density: 1, value_bits: 32}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
  - {name: other, kind: datacenter, batch_size: 4}
  - {name: home, kind: participants, stages: 2, batch_size: 4, micro_batches: 2}
"""


@pytest.mark.parametrize(("most", "following"), [(0.5, 1_024), (100, 1_024), (100, 0)])
def test_blobs_cross_in_as_many_calls_as_predicted(
    most: float, following: int, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call has room for `most` blobs of a layer, and a reply for `following` after its first.

    Without compression each blob has the predicted size.
    """
    path = tmp_path / "calls.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)))
    spec = spec_of(ConfigFile(path))
    room = int(most * blob_sizes(spec)["home"]["layers.0"])
    monkeypatch.setattr(contribution, "BATCH_BYTES_MAX", room)
    for module in (decided, traffic):
        monkeypatch.setattr(module, "FOLLOWING_BYTES_MAX", room)
        monkeypatch.setattr(module, "FOLLOWING_MAX", following)
    calls = Counter[str]()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(servicer: Any, request: Any, context: Any) -> Any:
            calls[servicer.callers.of(context).name] += 1
            return real(servicer, request, context)

        return call

    for name in ("Deposit", "Fetch"):
        monkeypatch.setattr(server._Servicer, name, counted(getattr(server._Servicer, name)))
    run_over_grpc(spec, tmp_path / "run", dict.fromkeys(spec.members, torch.device("cpu")))
    predicted = {name: exchange_calls(spec, member) for name, member in spec.members.items()}
    assert calls == {name: spec.config.rounds * count for name, count in predicted.items()}
