"""A long row of a table selects with numba, if it is installed, to the same bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from test_fast import DC, HOME, METHODS, _config, _train  # type: ignore[import-not-found]

from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.research.vectorized import contributions
from hetero_pp.research.vectorized.contributions import WORTH_NUMBA, fastest

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@needs_numba
@pytest.mark.parametrize("method", ["sparseloco", "sparseloco 2 bits", "diloco_lom_sub_k"])
def test_a_row_has_the_same_bits_with_numba(
    method: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, boundary, *_ = METHODS[method]
    config = _config(corpus, outer, [DC, {**HOME, "boundary": boundary}])
    first = _train(config, tmp_path)[0]
    monkeypatch.setattr(contributions, "WORTH_NUMBA", 0)
    second = _train(config, tmp_path)[0]
    assert (first.validation_loss, first.compressed) == (second.validation_loss, second.compressed)


def test_only_long_rows_select_with_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would take longer than a short one saves. A choice of the user stays."""
    plain = CompressionSettings.model_validate({})
    chosen = plain.model_copy(update={"accelerator": "compile"})
    monkeypatch.setattr(contributions.importlib.util, "find_spec", lambda name: object())
    assert fastest(plain, WORTH_NUMBA).accelerator == "numba"
    assert fastest(plain, WORTH_NUMBA - 1).accelerator == "torch"
    assert fastest(chosen, WORTH_NUMBA).accelerator == "compile"
    monkeypatch.setattr(contributions.importlib.util, "find_spec", lambda name: None)
    assert fastest(plain, WORTH_NUMBA).accelerator == "torch"
