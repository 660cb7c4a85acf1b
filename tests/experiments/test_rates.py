"""Every method has the learning rate that its search found, unless a row, its size or its table sets another."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from catalogs import SHIPPED
from pydantic import ValidationError

from hetero_pp.research.experiments.claims import judge
from hetero_pp.research.experiments.definition import Claim, Experiment, Method, Row, Scale
from hetero_pp.research.experiments.rows import Setting, method_of, rate_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MICRO = SHIPPED.scale("micro")
SEARCHES = {"micro": "search/inner_rate", "micro_long": "search/inner_rate_long"}
"""Search that found the rates, by scale."""
TUNED = MICRO.model_copy(
    update={
        "rates": {"diloco": 3e-3, "pp_compress_free": 4e-3, "demo": 5e-3},
        "sizes": {"own": {"inner.learning_rate": 7e-3}, "wide": {"model.width": 128}},
    }
)
_DILOCO = {"outer.method": "diloco"}
_SGD = {**_DILOCO, "outer.momentum": 0.0, "outer.nesterov": False}
_COMPRESSED = {"compressed": "all", "rank": 1 / 8}
_FREE = {**_COMPRESSED, "embedding": "free"}


def _setting(row: dict[str, Any], scale: Scale = TUNED, **experiment: Any) -> tuple[Setting, Row]:
    one = Row(name="one", **row)
    return Setting(scale, Experiment(name="toy/one", title="", baseline="one", rows=[one], **experiment)), one


def _rate(row: dict[str, Any], scale: Scale = TUNED, **experiment: Any) -> float:
    setting, one = _setting(row, scale, **experiment)
    return rate_of(setting.config(one))


METHODS: dict[str, list[dict[str, Any]]] = {
    "adamw": [{"replicas": 1, "cells": {"outer.method": "adamw_ddp"}}],
    "adamw_ddp": [{"cells": {"outer.method": "adamw_ddp"}}, {**_COMPRESSED, "cells": {"outer.method": "adamw_ddp"}}],
    "diloco": [{"cells": _DILOCO}, {"cells": {**_DILOCO, "outer.compression.density": 1 / 4}}],
    "diloco_one_worker": [{"replicas": 1, "cells": _DILOCO}],
    "diloco_sgd": [
        {"cells": _SGD},
        {"cells": {"outer.compression.density": 1, "outer.compression.error_feedback_decay": 0}},
        {"cells": {"outer.compression.density": 1, "outer.compression.value_bits": 2}},
    ],
    "diloco_momentum": [{"cells": {**_DILOCO, "outer.nesterov": False}}],
    "diloco_adam": [{"cells": {**_SGD, "outer.optimizer": "adam"}}],
    "diloco_lom": [{"cells": {"outer.method": "diloco_lom"}}],
    "sparseloco": [
        {},
        {"cells": {"outer.momentum": 0.9, "outer.nesterov": True}},
        {"compressed": "half", "cells": {"replicas.boundary.dtype": "fp32"}},
    ],
    "muon": [{"cells": {"inner.optimizer": "muon"}}, {**_COMPRESSED, "cells": {"inner.optimizer": "muon"}}],
    "demo": [{"cells": {"outer.method": "demo"}}, {"cells": {"outer.aggregation": "sign"}}],
    "pp_compress": [_COMPRESSED, {**_COMPRESSED, "embedding": "projected"}],
    "pp_compress_free": [
        _FREE,
        {"compressed": "all", "embedding": "free", "ablations": {"peer": {"method": "tah_quant"}}},
    ],
    "het_pp_compress": [{**_COMPRESSED, "compressed": "half"}],
    "het_pp_compress_free": [{**_FREE, "compressed": share} for share in ("half", 3 / 4)],
}
"""Rows of each method."""


@pytest.mark.parametrize("method", METHODS)
def test_the_method_of_a_row_follows_from_its_settings(method: str) -> None:
    for row in METHODS[method]:
        setting, one = _setting(row)
        assert method_of(setting.config(one)) == method


def test_a_row_has_the_rate_of_its_method() -> None:
    assert _rate({"cells": _DILOCO}) == 3e-3
    assert _rate(_FREE | {"size": "wide"}) == 4e-3
    assert _rate({"cells": _SGD}) == 1e-2  # the scale's, because nothing was found for this method
    assert _rate({"cells": _DILOCO}, MICRO.model_copy(update={"rates": {}})) == 1e-2


def test_a_row_its_size_or_its_table_may_set_another_rate() -> None:
    own = {"inner.learning_rate": 6e-3}
    assert _rate({"cells": _DILOCO | own}) == 6e-3
    assert _rate({"cells": _DILOCO, "at": {"micro": own}}) == 6e-3
    assert _rate({"cells": _DILOCO}, at={"micro": own}) == 6e-3
    assert _rate({"cells": _DILOCO}, at={"small": own}) == 3e-3
    assert _rate({"cells": _DILOCO, "size": "own"}) == 7e-3


def test_the_rate_of_demo_is_the_outer_one() -> None:
    signs = {"inner.optimizer": "sgd", "inner.learning_rate": 1.0, "outer.method": "demo"}
    setting, one = _setting({"cells": signs})
    config = setting.config(one)
    assert (config.inner.learning_rate, config.outer.learning_rate, rate_of(config)) == (1.0, 5e-3, 5e-3)
    assert _rate({"cells": signs | {"outer.learning_rate": 6e-3}}) == 6e-3


def test_a_rate_is_part_of_what_a_row_means_only_where_it_differs() -> None:
    def meaning(rates: dict[str, float]) -> Any:
        setting, one = _setting({"cells": _DILOCO}, MICRO.model_copy(update={"rates": rates}))
        return setting.meaning(one)

    assert meaning({"diloco": 1e-2}) == meaning({"diloco_sgd": 2e-3}) == meaning({})
    assert meaning({"diloco": 2e-3}) != meaning({})


@pytest.mark.parametrize(("rates", "key"), [({"sgd": 1e-2}, "sgd"), ({"diloco": 0}, "diloco")])
def test_rates_are_of_known_methods(rates: dict[str, float], key: str) -> None:
    with pytest.raises(ValidationError) as error:
        Scale.model_validate(MICRO.model_dump() | {"rates": rates})
    assert key in error.value.errors()[0]["loc"]


@pytest.mark.parametrize("scale", [one for one in SHIPPED.scales.values() if one.rates], ids=lambda scale: scale.name)
def test_no_rate_of_a_scale_is_worse_than_the_best_of_its_search(scale: Scale) -> None:
    """The best one does not end lower by more than noise, and lower and higher ones than the best were tried.

    Where both have one seed in common, which has no interval, 0.05 nats count as noise.
    """
    search = SHIPPED.experiment(SEARCHES[scale.name])
    table = json.loads((RESULTS / scale.name / f"{search.name}.json").read_text())
    losses = {row["name"]: row["ours"]["seeds"] for row in table["rows"] if row["ours"] is not None}
    tried: dict[Method, dict[float, dict[int, float]]] = defaultdict(dict)
    for row in search.rows:
        if row.name in losses:
            config = Setting(scale, search).config(row)
            tried[method_of(config)][rate_of(config)] = {int(seed): loss for seed, loss in losses[row.name].items()}
    assert set(scale.rates) == set(tried)
    for method, seeds in tried.items():
        best, chosen = min(seeds, key=lambda rate: seeds[rate][1]), scale.rates[method]
        assert min(seeds) < best < max(seeds), method
        found = judge(Claim(text="", lower=("best", "chosen")), {"best": seeds[best], "chosen": seeds[chosen]}, {})
        assert found.verdict != "holds", method
        assert found.verdict != "one seed" or seeds[chosen][1] - seeds[best][1] <= 0.05, method
