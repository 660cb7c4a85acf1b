"""One key with several values, as `--sweep` and the YAML write it."""

from __future__ import annotations

import pytest

from hetero_pp.core.errors import ConfigError
from hetero_pp.simulator.charts import POINTS, changes_nothing, parse_sweep, quantity_of


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("inner.steps=5", "inner.steps", ["5"]),
        (" a.b = 1/8, 1/32 ,full", "a.b", ["1/8", "1/32", "full"]),
        ("links.home.bandwidth=10 Mbit/s,1Gbit/s", "links.home.bandwidth", ["10 Mbit/s", "1Gbit/s"]),
        ("data.corpus=hf:a=b", "data.corpus", ["hf:a=b"]),
    ],
)
def test_values(text: str, key: str, values: list[str]) -> None:
    assert parse_sweep("--sweep", text) == (key, values)


def test_a_range_grows_by_one_factor_from_end_to_end() -> None:
    key, values = parse_sweep("--sweep", "a=1Mbit/s..1 Gbit/s")
    numbers = [quantity_of(value) for value in values]
    assert key == "a"
    assert len(numbers) == POINTS
    assert {number[1] for number in numbers if number is not None} == {"bit/s"}
    assert [number[0] for number in numbers if number is not None] == pytest.approx(
        [1e6 * 10 ** (index / 4) for index in range(POINTS)]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inner.steps", "expected KEY=FROM..TO or KEY=A,B,C"),
        ("=5", "expected KEY=FROM..TO or KEY=A,B,C"),
        ("inner.steps=", "expected KEY=FROM..TO or KEY=A,B,C"),
        ("inner.steps=5,,6", "expected KEY=FROM..TO or KEY=A,B,C"),
        ("=1ms..2ms", "expected KEY=FROM..TO or KEY=A,B,C"),
        ("a=1..10", "expected both ends in units of one kind, such as `10Mbit/s..10Gbit/s`"),
        ("a=1ms..10Mbit/s", "expected both ends in units of one kind, such as `10Mbit/s..10Gbit/s`"),
        ("a=2ms..1ms", "expected a range from a value above 0 to a larger one"),
        ("a=0ms..1ms", "expected a range from a value above 0 to a larger one"),
    ],
)
def test_a_mistake_is_told_with_the_option_it_is_in(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sweep("--curves", text)
    assert str(error.value) == f"--curves {text}: {words}"


def test_one_value_alone_shows_nothing_and_one_that_differs_is_enough() -> None:
    assert changes_nothing([3.0, 3.0, 3.0])
    assert not changes_nothing([3.0, 3.0, 3.5])
    assert not changes_nothing([3.0])


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("10kbit/s", (1e4, "bit/s")),
        (" 1 MB/s", (8e6, "bit/s")),
        ("20ms", (0.02, "s")),
        ("2KiB", (2048, "B")),
        ("10", None),
        ("1/8", None),
        ("full", None),
    ],
)
def test_quantities(text: str, quantity: tuple[float, str] | None) -> None:
    assert quantity_of(text) == quantity
