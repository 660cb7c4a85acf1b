"""The identity of a row: everything that decides its result and nothing else; and the outcomes stored under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED

from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import TokenStore
from hetero_pp.model.transformer import PRESETS
from hetero_pp.research.experiments.corpus import Corpus
from hetero_pp.research.experiments.definition import Experiment, Row
from hetero_pp.research.experiments.outcomes import ROWS, read_outcomes
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.training import Job, key_of, known_outcomes, make_job
from hetero_pp.research.settings import ResearchConfig

ROOT = Path(__file__).parents[2]
MICRO = SHIPPED.scale("micro")
RESULTS = ROOT / "benchmarks" / "results"


def _corpus(digest: str, name: str = "docstrings") -> Corpus:
    none = np.zeros(0, np.uint16)
    store = TokenStore(train=none, validation=none, vocabulary=MICRO.vocabulary, path=Path("store"), digest=digest)
    return Corpus(DataSettings(corpus=name, tokenizer="its own.json"), store, Path("cache"))


def _job(tokens: Corpus | None = None, repeat: bool = False, **row: Any) -> Job:
    every = {key: row.pop(key, None) for key in ("bias_every", "similarity_every", "volume_every", "outer_every")}
    one = Row(name=row.pop("name", "one"), **{"compressed": "half", "rank": 8} | row)
    experiment = Experiment(name="toy/one", title="", paper="", baseline=one.name, rows=[one], claims=[], **every)
    return make_job(Setting(MICRO, experiment, repeat=repeat), one, 1, tokens or _corpus("a"), Path(ROWS))


NO_MATTER: dict[str, dict[str, Any]] = {
    "its name": {"name": "other"},
    "the paper's loss": {"paper": 1.0},
    "a ratio of the width": {"rank": 1 / 8},
    "where its tokens come from": {"tokens": _corpus("a", "elsewhere.txt")},
    "whether they may be repeated": {"repeat": True},
    "a default, said": {"cells": {"outer.divides_by": "replicas", "inner.clip_norm": 1.0, "model.preset": "micro"}},
    "no weights, said": {"cells": {"model.weights": None}},
    "what selects": {"cells": {"outer.compression.accelerator": "numba"}},
    "how many threads": {"cells": {"threads": 2}},
    "on what a replica runs": {"cells": {"replicas.hardware": "h100"}, "compressed": "none"},
    "how it is streamed": {"cells": {"data.stream.shuffle_buffer": 5}},
    "what is simulated": {"cells": {"simulate.tokens": 5}},
    "links": {"cells": {"links": {"dsl": {}}, "replicas.uplink": "dsl"}},
}
MATTERS: dict[str, dict[str, Any]] = {
    "which tokens": {"tokens": _corpus("b")},
    "what is measured beside it": {"bias_every": 5},
    "how often": {"bias_every": 6},
    "another measurement": {"similarity_every": 5},
    "and another": {"volume_every": 5},
    "of the outer gradient": {"outer_every": 5},
    "its rank": {"rank": 16},
    "no compression at the full rank": {"rank": 64},
    "none": {"rank": "full"},
    "how many replicas": {"replicas": 2},
    "weights to start from": {"cells": {"model.weights": "some/folder"}},
    "what divides": {"cells": {"outer.divides_by": "senders"}},
    "rounds": {"budget": 2.0},
}


@pytest.mark.parametrize("change", NO_MATTER.values(), ids=NO_MATTER)
def test_what_decides_nothing_is_no_part_of_the_key(change: dict[str, Any]) -> None:
    without = {name: value for name, value in change.items() if name == "compressed"}
    assert _job(**change).key == _job(**without).key


def test_all_that_decides_is_part_of_the_key() -> None:
    keys = [_job().key, *(_job(**change).key for change in MATTERS.values())]
    assert len(set(keys)) == len(keys)


def test_another_version_trains_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _job().key
    monkeypatch.setattr("hetero_pp.research.experiments.training.OUTCOME_VERSION", 1000)
    assert _job().key != before


def test_rows_that_move_the_basis_and_train_coefficients_are_new() -> None:
    moves: dict[str, Any] = {"ablations": {"grassmann_every": 1}}
    assert _job(**moves, embedding="coefficients").identity["moments"] == "turned with U"
    for row in (
        moves | {"embedding": "free"},
        {"embedding": "coefficients"},
        moves | {"compressed": "none", "rank": "full"},
    ):
        assert "moments" not in _job(**row).identity


DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model.preset": "micro",
    "model.vocabulary": None,
    "model.rope_theta": 10000.0,
    "model.norm_epsilon": 1e-05,
    "model.weights": None,
    "data.text_field": "text",
    "data.sequence_length": 128,
    "data.validation_share": 0.02,
    "data.validation_sequences": 64,
    "inner.steps": 10,
    "inner.learning_rate": 0.01,
    "inner.final_learning_rate_share": 0.1,
    "inner.warmup_steps": 10,
    "inner.betas": [0.9, 0.95],
    "inner.epsilon": 1e-08,
    "inner.weight_decay": 0.1,
    "inner.clip_norm": 1.0,
    "outer.source": "difference",
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
    "outer.nesterov": False,
    "outer.divides_by": "replicas",
    "outer.compression.density": 0.03125,
    "outer.compression.tile": [64, 64],
    "outer.compression.selection": "top_k",
    "outer.compression.quantiser": "signs",
    "outer.compression.value_bits": 1,
    "outer.compression.error_feedback_decay": 0.95,
    "replicas.0.batch_size": 8,
    "replicas.0.micro_batches": 1,
    "replicas.0.engine": "torch",
    "replicas.1.boundary.rank": "full",
    "replicas.1.boundary.dtype": "bf16",
    "replicas.1.boundary.bits": None,
    "research.ablations.adaptation": "on",
    "research.ablations.weight_projection": False,
    "research.ablations.modified_adamw": False,
    "research.ablations.grassmann_every": None,
    "replicas.1.extra_in_flight": 1,
}
"""Default values of settings that rows leave out."""


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}")
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{key}.{index}")
    else:
        yield key.removeprefix("."), value


def test_defaults_are_those_that_kept_rows_leave_out() -> None:
    """A field may be added if its default changes nothing. Another default needs another OUTCOME_VERSION."""
    replicas = [{"name": "a", "kind": "datacenter"}, {"name": "b", "kind": "participants", "stages": 2}]
    config = ResearchConfig.model_validate({"name": "a", "outer": {"rounds": 1}, "replicas": replicas})
    found = dict(_leaves(meaning(config, NotPartOf.OUTCOME)))
    assert found | DEFAULTS == found
    assert PRESETS["micro"] == {"width": 64, "layers": 4, "heads": 2, "feed_forward": 192}


KEPT = {scale: read_outcomes(RESULTS / scale / ROWS) for scale in ("micro", "micro_long", "ladder")}


KNOWN = {scale: known_outcomes(kept) for scale, kept in KEPT.items()}


@pytest.mark.parametrize("scale", KEPT)
def test_kept_rows_are_known_by_what_they_say(scale: str) -> None:
    assert len(KEPT[scale]) >= {"micro": 1100, "micro_long": 44, "ladder": 54}[scale]
    measured = ("bias_every", "bias_of", "similarity_every", "volume_every", "outer_every")
    parts = ("version", "corpus", "tokenizer", "steps_of", "moments", "settings", *measured)
    for key, outcome in KEPT[scale].items():
        assert key_of({part: outcome[part] for part in parts if part in outcome}) == key
        assert outcome["settings"]["seed"] == outcome["seed"]


def test_a_row_that_was_measured_is_known_without_that_too() -> None:
    plain, measured, biased = _job(), _job(volume_every=3), _job(bias_every=3)
    kept = {job.key: {"key": job.key, **job.identity} for job in (measured, biased)}
    assert known_outcomes(kept) == kept | {plain.key: kept[measured.key]}
    assert _job(similarity_every=3).key not in known_outcomes(kept)
    both = kept | {plain.key: {"key": plain.key, **plain.identity}}
    assert known_outcomes(both) == both
