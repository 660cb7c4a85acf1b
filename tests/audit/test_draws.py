"""Draws of rounds: nobody can foresee or choose them, and everybody can check them afterwards."""

from __future__ import annotations

import hashlib

import pytest

from replica_groups.rounds.draws import CHAIN_ROUNDS, Chain, drawn, leads_to

SEED = b"s" * 32


def test_secrets_lead_to_the_published_end() -> None:
    chain = Chain(SEED, 12)
    assert leads_to(chain.secret(12), 12, 12, chain.end)
    assert leads_to(chain.secret(40), 40, 12, chain.end)
    assert hashlib.sha256(chain.secret(13)).digest() == chain.secret(12)
    assert chain.secret(chain.after - 1) == SEED


def test_another_secret_does_not() -> None:
    chain = Chain(SEED, 12)
    assert not leads_to(chain.secret(13), 12, 12, chain.end)
    assert not leads_to(bytes(32), 12, 12, chain.end)
    assert Chain(SEED, 12).end != Chain(b"t" * 32, 12).end


@pytest.mark.parametrize("round_", [11, 12 + CHAIN_ROUNDS])
def test_rounds_beyond_the_chain(round_: int) -> None:
    with pytest.raises(ValueError, match=r"is not one of the 65,536 rounds from 12 on"):
        Chain(SEED, 12).secret(round_)


def test_a_secret_tells_nothing_of_later_ones() -> None:
    """The seed cannot be computed from what is revealed: only its hashes are."""
    chain = Chain(SEED, 1)
    later = chain.secret(3)
    assert later not in (hashlib.sha256(chain.secret(2)).digest(), chain.secret(2), chain.end)


def test_each_replica_is_drawn_in_its_share_of_rounds() -> None:
    names = [f"r{number}" for number in range(10)]
    records = [hashlib.sha256(str(number).encode()).digest() for number in range(2000)]
    found = [drawn(SEED, record, names, 0.1) for record in records]
    for name in names:
        assert 150 < sum(name in one for one in found) < 250
    assert drawn(SEED, records[0], names, 1.0) == sorted(names)


def test_a_draw_depends_on_record_and_secret() -> None:
    names = [f"r{number}" for number in range(64)]
    draws = {tuple(drawn(secret, record, names, 0.5)) for secret in (SEED, b"t" * 32) for record in (b"a", b"b")}
    assert len(draws) == 4
    assert drawn(SEED, b"a", names, 0.5) == drawn(SEED, b"a", reversed(names), 0.5)
