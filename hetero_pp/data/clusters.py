"""Windows of a corpus that are alike: shards that differ from each other, as DiLoCo's non-i.i.d. ones do.

Source: DiLoCo (Douillard et al. 2023), section 3.1: k-means over the training set, by features of a pretrained model's
last layer. What differs: a run from scratch has no such model, so that the features of a window are its tokens'
frequencies (tf-idf), in as many dimensions as tell most windows apart (latent semantic analysis).

All processes have to find the same clusters, and rounding is not the same in all: it depends on how many threads add
up. Where two centers are as near as each other, it would decide. So features and centers are whole multiples of a small
unit, whose distances float64 holds exactly, in any order.

Shapes: N windows of L + 1 tokens, F features, C clusters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_pp.data.tokens import TokenStore
from hetero_pp.errors import ConfigError
from hetero_pp.files import write_whole
from hetero_pp.seeds import seed_of

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_FORMAT = 1
_DIGEST = hashlib.sha256().digest_size
_KEY = ("data", "clusters")
_SAMPLED, _TOKENS = 20_000, 8 << 20
"""Windows of which centers are found, and tokens that these have at most. For all others only the nearest one is, of as
many at once.
"""
_FEATURES = 64
_LEAST = 1e-3
"""Of the largest singular value: what is less is little but rounding."""
_UNIT = 2.0**-20
"""Of features and centers, which are at most 1: 64 products of two of them fit into the 53 bits of a float64."""
_ITERATIONS = 300
_TRIES = 10
"""Until all clusters have windows."""

Features = Callable[[np.ndarray], np.ndarray]
"""Windows int64 [n, L + 1] -> fp64 [n, F], each of length 1 but for rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    """Which window of the train part is in which cluster."""

    labels: np.ndarray
    """The cluster of each window, uint16 [N]."""

    def windows(self, share: int, shares: int) -> np.ndarray:
        """The windows, ascending, of one of so many shares: those of the clusters `share`, `share + shares`, ..."""
        return np.flatnonzero(self.labels % shares == share)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the labels: the same where the same windows are in the same clusters."""
        return hashlib.sha256(self.labels.astype("<u2").tobytes()).hexdigest()


def find_clusters(store: TokenStore, sequence_length: int, count: int, seed: int) -> Clusters:
    """The clusters of a store's windows, found once and kept beside it.

    Raises ConfigError if there are fewer different windows than clusters.
    """
    size = len(store.train) // (sequence_length + 1)
    key = json.dumps([_FORMAT, store.digest, len(store.train), sequence_length, count, seed])
    path = store.path.parent / f"clusters-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    kept = _kept(path)
    if kept is not None and len(kept.labels) == size:
        return kept
    windows = store.train[: size * (sequence_length + 1)].reshape(size, sequence_length + 1)
    found = Clusters(labels=_found(windows, store.vocabulary, count, seed))
    with suppress(OSError):  # else they are found again by who needs them next
        write_whole(path, bytes.fromhex(found.digest) + found.labels.astype("<u2").tobytes())
    return found


def _kept(path: Path) -> Clusters | None:
    """What a file has behind its digest; None if there is none, or it is not what was written."""
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        return None
    return Clusters(labels=np.frombuffer(data[_DIGEST:], "<u2").astype(np.uint16))


def _found(windows: np.ndarray, vocabulary: int, count: int, seed: int) -> np.ndarray:
    """The cluster of each window, uint16 [N]: the nearest of centers that k-means finds in a sample."""
    from scipy.cluster.vq import vq

    if count == 1:
        return np.zeros(len(windows), np.uint16)
    generator = np.random.default_rng(seed_of(seed, "clusters"))
    picked = np.sort(generator.permutation(len(windows))[: _at_once(windows)])
    sample = windows[picked].astype(np.int64)
    different = len(np.unique(np.sort(sample, axis=1), axis=0))
    if different < count:
        several = "windows of text" if len(sample) == len(windows) else f"of {len(sample)} windows of text"
        raise ConfigError(_KEY, f"found {count}, expected at most the {different} {several} that differ")
    features_of = _features(sample, vocabulary)
    centers = _centers(features_of(sample), count, generator)
    return np.concatenate([vq(features_of(part), centers)[0] for part in _parts(windows)]).astype(np.uint16)


def _centers(features: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Centers [C, F] of features [n, F] by Lloyd's algorithm."""
    from scipy.cluster.vq import ClusterError, kmeans2

    for _ in range(_TRIES):
        try:
            means = _start(features, count, generator)
            for _ in range(_ITERATIONS):
                centers = _rounded(means)
                means, _ = kmeans2(features, centers, iter=1, minit="matrix", missing="raise")
                if np.array_equal(_rounded(means), centers):
                    break
            return _rounded(means)
        except ClusterError:
            continue
    raise ConfigError(_KEY, f"found {count}, of which some came to be empty, expected fewer, or more text")


def _start(features: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Features that are far from each other [C, F], by k-means++ (Arthur and Vassilvitskii 2007): scipy's compares all
    with all again for each.
    """
    centers = np.empty((count, features.shape[1]))
    nearest = np.full(len(features), np.inf)
    for place in range(count):
        if place == 0:
            index = int(generator.integers(len(features)))
        else:
            index = int(np.searchsorted((nearest / nearest.sum()).cumsum(), generator.uniform()))
        centers[place] = features[min(index, len(features) - 1)]
        nearest = np.minimum(nearest, ((features - centers[place]) ** 2).sum(axis=1))
    return centers


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.round(values / _UNIT) * _UNIT


def _at_once(windows: np.ndarray) -> int:
    return min(_SAMPLED, max(1, _TOKENS // windows.shape[1]))


def _parts(windows: np.ndarray) -> Iterator[np.ndarray]:
    many = _at_once(windows)
    for start in range(0, len(windows), many):
        yield windows[start : start + many].astype(np.int64)


def _features(sample: np.ndarray, vocabulary: int) -> Features:
    """Features by what a sample int64 [n, L + 1] tells of tokens: how rare each is, and which occur together."""
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import svds

    counts = _counts(sample, vocabulary)
    holders = np.bincount(counts.indices, minlength=vocabulary)
    rarity = diags_array(1 + np.log((1 + len(sample)) / (1 + holders)))

    def weighed(found: csr_matrix) -> Any:
        found.data = 1 + np.log(found.data)
        scaled = found @ rarity
        lengths = np.sqrt(np.asarray(scaled.multiply(scaled).sum(axis=1)).ravel())
        return diags_array(1 / np.maximum(lengths, np.finfo(float).tiny)) @ scaled

    fewer = min(len(sample), vocabulary)
    _, lengths, axes = svds(weighed(counts), k=min(_FEATURES, fewer - 1), v0=np.ones(fewer))
    axes = axes[lengths > _LEAST * lengths.max()].T

    def features(windows: np.ndarray) -> np.ndarray:
        found = np.asarray(weighed(_counts(windows, vocabulary)) @ axes)
        return _rounded(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(float).tiny))

    return features


def _counts(windows: np.ndarray, vocabulary: int) -> csr_matrix:
    """How often each token occurs in each window [n, V]."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(windows)), windows.shape[1])
    ones = np.ones(windows.size)
    return csr_matrix((ones, (rows, windows.ravel())), shape=(len(windows), vocabulary))
