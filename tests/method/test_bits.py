"""Packed numbers, compared with strings of binary digits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_pp.core import bits

WIDTHS = st.integers(1, 20)


def _by_hand(values: list[int], width: int) -> bytes:
    digits = "".join(format(value, f"0{width}b") for value in values)
    digits += "0" * (-len(digits) % 8)
    return bytes(int(digits[start : start + 8], 2) for start in range(0, len(digits), 8))


@st.composite
def _numbers(draw: st.DrawFn) -> tuple[list[int], int]:
    width = draw(WIDTHS)
    return draw(st.lists(st.integers(0, 2**width - 1), max_size=70)), width


@settings(deadline=None)
@given(_numbers())
def test_packing_is_the_binary_digits_in_a_row(numbers: tuple[list[int], int]) -> None:
    values, width = numbers
    packed = bits.pack(np.array(values, dtype=np.int64), width)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == _by_hand(values, width)
    assert len(packed) == bits.packed_size(len(values), width)
    assert bits.unpack(packed, width, len(values)).tolist() == values


@settings(deadline=None)
@given(_numbers(), st.integers(-3, 3).filter(bool))
def test_a_wrong_number_of_bytes_is_refused(numbers: tuple[list[int], int], by: int) -> None:
    values, width = numbers
    packed = bits.pack(np.array(values, dtype=np.int64), width)
    if by < 0:
        packed = packed[:by] if len(packed) else np.zeros(1, dtype=np.uint8)
    else:
        packed = np.concatenate([packed, np.zeros(by, dtype=np.uint8)])
    with pytest.raises(ValueError, match="bytes"):
        bits.unpack(packed, width, len(values))


def test_unpacking_starts_anywhere_in_a_buffer() -> None:
    for width in (8, 12, 16):
        packed = bits.pack(np.array([3, 200, 77]), width)
        buffer = np.concatenate([np.zeros(3, dtype=np.uint8), packed])
        assert bits.unpack(buffer[3:], width, 3).tolist() == [3, 200, 77]


@settings(deadline=None)
@given(st.integers(1, 2**20))
def test_the_width_is_the_least_that_tells_values_apart(count: int) -> None:
    width = bits.width_of(count)
    assert 2**width >= count
    assert width == 1 or 2 ** (width - 1) < count
