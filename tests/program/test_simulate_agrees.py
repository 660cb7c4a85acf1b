"""Bytes of each link and direction of a launched run, as `simulate` predicts them and as the run measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from started import run_program

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.exchange_load import exchange_load
from hetero_pp.simulator.traffic import checkpoint_bytes, message_bytes

pytestmark = pytest.mark.starts_processes

ROUNDS, VALIDATION_BATCHES = 2, 3
YAML = f"""\
name: small
model: {{preset: micro, width: 32, heads: 2, feed_forward: 64}}
data: {{corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: {2 * VALIDATION_BATCHES}}}
inner: {{steps: 4}}
outer: {{rounds: {ROUNDS}, compression: {{density: 1/32}}}}
links:
  home: {{bandwidth: 20 Mbit/s, latency: 1 ms, jitter: 1 ms}}
replicas:
  - {{name: dc, kind: datacenter, batch_size: 4, uplink: home}}
  - {{name: few, kind: participants, stages: 3, batch_size: 6, micro_batches: 3, link: home, uplink: home,
     boundary: {{rank: 1/2, bits: 4}}}}
  - {{name: half, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, link: home, uplink: home,
     boundary: {{rank: 1/8}}}}
"""


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, dict[str, Any], dict[str, Any]]:
    """Return the spec, and the links of `simulate --json` and of `summary.json` by name."""
    folder = tmp_path_factory.mktemp("agrees")
    yaml = folder / "small.yaml"
    yaml.write_text(YAML.replace("CORPUS", str(corpus)))
    _program("simulate", str(yaml), "--json", str(folder / "predicted.json"))
    _program("launch", str(yaml), "--runs", str(folder / "runs"))
    predicted = _links(folder / "predicted.json")
    measured = _links(folder / "runs" / "small" / "summary.json")
    return spec_of(ConfigFile(yaml)), predicted, measured


def _links(path: Path) -> dict[str, Any]:
    return {link["name"]: link for link in json.loads(path.read_text())["links"]}


def _program(*arguments: str) -> None:
    done = run_program(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_link_carries_what_was_predicted(run: tuple[RunSpec, dict[str, Any], dict[str, Any]]) -> None:
    """A run has one evaluation more than rounds, before the first round, and fetches the first run checkpoint."""
    spec, predicted, measured = run
    assert predicted.keys() == measured.keys() and len(measured) == 3 + 6
    before: dict[tuple[str, str], float] = {}
    for replica in spec.config.replicas:
        evaluation = VALIDATION_BATCHES * message_bytes(spec, replica)["evaluation"]
        before |= {(link, "forward"): evaluation for link in predicted if link.startswith(f"{replica.name}.")}
    for member in spec.members.values():
        before[f"{member.name}-exchange", "forward"] = 0.0
        before[f"{member.name}-exchange", "backward"] = checkpoint_bytes(spec, member)
    for name, link in measured.items():
        for direction in ("forward", "backward"):
            expected = before.get((name, direction), 0.0) + ROUNDS * predicted[name][f"{direction}_bytes"]
            tolerance = 0.1 if name.endswith("exchange") else 0.01  # the size of a blob depends on its values
            assert link["wire_bytes"][direction] == pytest.approx(expected, rel=tolerance), (name, direction)


def test_the_exchange_carries_what_was_predicted(run: tuple[RunSpec, dict[str, Any], dict[str, Any]]) -> None:
    """The load is compared per round and at the start. The size of a blob depends on its values."""
    spec, _, measured = run
    load = exchange_load(spec)
    links = [link for name, link in measured.items() if name.endswith("-exchange")]
    received, sent = (sum(link["wire_bytes"][way] for link in links) for way in ("forward", "backward"))
    assert received == pytest.approx(ROUNDS * load.contributions.received, rel=0.1)
    assert sent == pytest.approx(load.first_checkpoint_bytes + ROUNDS * load.contributions.sent, rel=0.1)
    assert load.relayed_links == 0
