"""Errors that cross process boundaries."""

from __future__ import annotations

import pickle

from hetero_pp.core.errors import ConfigError


def test_a_complaint_arrives_from_another_process_as_it_was() -> None:
    """A pool of workers pickles its errors."""
    sent = ConfigError(("replicas", 1, "rank"), "found `x`, expected a number")
    arrived = pickle.loads(pickle.dumps(sent))
    assert isinstance(arrived, ConfigError)
    assert (arrived.key, arrived.message, str(arrived)) == (sent.key, sent.message, str(sent))
