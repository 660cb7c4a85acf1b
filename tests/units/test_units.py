"""Quantities and ratios as people write them, alone and inside settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hetero_pp.core.settings import Bandwidth, Duration, Ratio, Settings, Size
from hetero_pp.core.units import (
    BITS_PER_SECOND,
    BYTES,
    SECONDS,
    format_bits_per_second,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    parse_fraction,
    parse_quantity,
)

TABLES = {"bandwidth": BITS_PER_SECOND, "duration": SECONDS, "size": BYTES}
numbers = st.floats(0, 1e30, allow_nan=False)


class Example(Settings):
    bandwidth: Bandwidth = 1e8
    duration: Duration = 0.02
    size: Size = 1024.0
    ratio: Ratio = 0.125
    limit: Bandwidth | None = None


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("bandwidth", "100 Mbit/s", 1e8),
        ("bandwidth", "100Mbps", 1e8),
        ("bandwidth", " 1.5 GB/s ", 12e9),
        ("bandwidth", "10_000 bit/s", 1e4),
        ("bandwidth", "1e-2 kbit/s", 10),
        ("duration", "20 ms", 0.02),
        ("duration", "5 µs", 5e-6),
        ("duration", "2 min", 120),
        ("size", "512 MiB", 2**29),
        ("size", "3 GB", 3e9),
    ],
)
def test_quantities(kind: str, text: str, value: float) -> None:
    assert parse_quantity(text, TABLES[kind], "") == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "text", "unit"),
    [
        ("bandwidth", "100 Mbps/s", "Mbps/s"),
        ("bandwidth", "100 Mb", "Mb"),
        ("bandwidth", "100 MiB/s", "MiB/s"),
        ("duration", "20 msec", "msec"),
        ("duration", "1 S", "S"),
        ("size", "512 mb", "mb"),
        ("size", "5 Mbit/s", "Mbit/s"),
    ],
)
def test_an_unknown_unit_is_named_with_the_known_ones(kind: str, text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"found `{text}` with the unknown unit `{unit}`") as caught:
        parse_quantity(text, TABLES[kind], "AN EXAMPLE")
    assert "such as `AN EXAMPLE`" in str(caught.value)
    assert all(known in str(caught.value) for known in TABLES[kind])


@pytest.mark.parametrize("value", ["", "100", "fast", "-1 s", "1..2 s", "nan s", "inf s", 100, 1.5, None, True, []])
def test_what_is_no_quantity(value: object) -> None:
    with pytest.raises(ValueError, match="expected a number and a unit such as `20 ms`"):
        parse_quantity(value, SECONDS, "20 ms")


@given(number=numbers, kind=st.sampled_from(sorted(TABLES)), data=st.data())
def test_any_number_with_any_unit(number: float, kind: str, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(TABLES[kind])))
    assert parse_quantity(f"{number!r} {unit}", TABLES[kind], "") == number * TABLES[kind][unit]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1/8", 0.125),
        (" 1/3 ", 1 / 3),
        ("0.125", 0.125),
        ("12.5 %", 0.125),
        ("1e-2", 0.01),
        (0.5, 0.5),
        (3, 3.0),
    ],
)
def test_ratios(value: object, expected: float) -> None:
    assert parse_fraction(value) == expected


@pytest.mark.parametrize("value", ["", "%", "1/0", "a", "1/8/2", "1 / x", math.nan, math.inf, None, True, [1]])
def test_what_is_no_ratio(value: object) -> None:
    with pytest.raises(ValueError, match="expected a number or a ratio such as `1/8`"):
        parse_fraction(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_the_same_ratio_as_its_text(value: float) -> None:
    assert parse_fraction(value) == parse_fraction(repr(value)) == value


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_ratio_is_the_quotient(above: int, below: int) -> None:
    assert parse_fraction(f"{above}/{below}") == above / below


@given(bandwidth=numbers, duration=numbers, size=numbers, ratio=numbers, limit=st.none() | numbers)
def test_settings_load_equal_from_what_they_serialise_to(**values: float | None) -> None:
    units = {"bandwidth": "bit/s", "limit": "bit/s", "duration": "s", "size": "B"}
    text = {
        key: f"{value!r} {units[key]}" if key in units and value is not None else value for key, value in values.items()
    }
    settings = Example.model_validate(text)
    assert settings.model_dump() == text
    assert Example.model_validate(settings.model_dump()) == settings
    assert Example.model_validate_json(settings.model_dump_json()) == settings


def test_defaults_load_equal_too() -> None:
    assert Example.model_validate(Example().model_dump()) == Example()
    assert Example().bandwidth == 1e8


def test_settings_are_closed_and_frozen() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Example.model_validate({"bandwith": "1 bit/s"})
    with pytest.raises(ValidationError, match="frozen"):
        Example().ratio = 0.5  # type: ignore[misc]


def test_a_wrong_unit_in_settings_is_a_validation_error() -> None:
    with pytest.raises(ValidationError, match="found `100 Mbps/s` with the unknown unit `Mbps/s`"):
        Example.model_validate({"bandwidth": "100 Mbps/s"})
    with pytest.raises(ValidationError, match="found `5`, expected a number and a unit"):
        Example.model_validate({"duration": 5})


def test_the_schema_shows_how_to_write_them() -> None:
    properties = Example.model_json_schema()["properties"]
    assert properties["bandwidth"]["examples"] == ["100 Mbit/s"]
    assert properties["ratio"]["type"] == ["number", "string"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bits_per_second(None), "unlimited"),
        (format_bits_per_second(1e8), "100 Mbit/s"),
        (format_bits_per_second(12.5e9), "12.5 Gbit/s"),
        (format_bits_per_second(10), "10 bit/s"),
        (format_bits_per_second(2e16), "20000 Tbit/s"),
        (format_bits_per_second(1e-5), "0.00001 bit/s"),
        (format_bytes(1536), "1.54 kB"),
        (format_bytes(5.1e15), "5100 TB"),
        (format_flops(5.1e16), "51 PFLOP"),
        (format_flops(1.6e3), "0.0016 MFLOP"),
        (format_bytes(0), "0 B"),
        (format_percent(0.1234), "12.3%"),
        (format_percent(-1e-9), "0.0%"),
        (format_percent(-0.0004), "0.0%"),
        (format_percent(-0.02), "-2.0%"),
        (format_ratio(1 / 32), "1/32"),
        (format_ratio(1 / 24), "1/24"),
        (format_ratio(1.0), "1"),
        (format_ratio(0.0), "0"),
        (format_ratio(1e-5), "1/100000"),
        (format_count(1, "replica"), "1 replica"),
        (format_count(2500, "replica"), "2,500 replicas"),
        (format_duration(0), "0 s"),
        (format_duration(5.76e-2), "57.6 ms"),
        (format_duration(0.99999), "1 s"),
        (format_duration(90), "1.5 min"),
        (format_duration(12873), "3.58 h"),
        (format_duration(366 * 86400), "366 days"),
        (format_duration(4e9), "127 years"),
        (format_number(5123), "5,120"),
        (format_number(5123, 2), "5,100"),
        (format_number(1.6e-5), "0.000016"),
        (format_seconds(0), "0 ms"),
        (format_seconds(1.6e-8), "0.016 µs"),
        (format_seconds(0.0002), "0.2 ms"),
        (format_seconds(0.02), "20 ms"),
        (format_seconds(1.5), "1.5 s"),
        (format_seconds(95), "1:35"),
        (format_seconds(3700), "1:01:40"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats(1, 1e15))
def test_what_is_formatted_parses_to_nearly_the_same(value: float) -> None:
    assert parse_quantity(format_bits_per_second(value), BITS_PER_SECOND, "") == pytest.approx(value, rel=1e-3)
    assert parse_quantity(format_bytes(value), BYTES, "") == pytest.approx(value, rel=0.5 if value < 1e3 else 1e-2)
