"""Clusters of similar windows of a corpus, for non-i.i.d. shards as in DiLoCo.

Source: DiLoCo (Douillard et al. 2023), section 3.1: k-means over the training set, on features of a pretrained model's
last layer. Difference: a run from scratch has no pretrained model. The features of a window are its token frequencies
(tf-idf), reduced to the main dimensions (latent semantic analysis).

All processes have to find the same clusters, but floating-point sums depend on the number of threads. If two centers
are equally near, rounding would decide. Therefore features and centers are multiples of a small unit, whose distances
float64 holds exactly in any order of summation.

Shapes: N windows of L + 1 tokens, F features, C clusters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.tokens import TokenStore

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_FORMAT = 1
_DIGEST = hashlib.sha256().digest_size
_KEY = ("research", "clusters")
_SAMPLED, _TOKENS = 20_000, 8 << 20
"""Largest number of windows, and of tokens in them, that determine the centers.

All other windows are only assigned to the nearest center, in batches of this size.
"""
_FEATURES = 64
_LEAST = 1e-3
"""Smallest singular value that is kept, relative to the largest. Smaller values are mostly rounding errors."""
_UNIT = 2.0**-20
"""Unit of features and centers, which are at most 1: sums of 64 products of two fit into float64's 53 bits."""
_ITERATIONS = 300
_TRIES = 10  # number of starts of k-means until every cluster has windows

Features = Callable[[np.ndarray], np.ndarray]
"""Function from windows int64 [n, L + 1] to float64 [n, F], each row of length 1 apart from rounding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Clusters:
    """Assignment of the windows of the training part to clusters."""

    labels: np.ndarray  # cluster of each window, uint16 [N]

    def windows(self, share: int, shares: int) -> np.ndarray:
        """Return, in ascending order, the windows of the clusters `share`, `share + shares`, `share + 2 shares`, ..."""
        return np.flatnonzero(self.labels % shares == share)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the labels: equal exactly for equal assignments."""
        return hashlib.sha256(self.labels.astype("<u2").tobytes()).hexdigest()


def find_clusters(store: TokenStore, sequence_length: int, count: int, seed: int) -> Clusters:
    """Return the clusters of a store's windows, computed once and cached beside the store.

    Raises ConfigError if there are fewer different windows than clusters.
    """
    size = len(store.train) // (sequence_length + 1)
    key = json.dumps([_FORMAT, store.digest, len(store.train), sequence_length, count, seed])
    path = store.path.parent / f"clusters-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST] and len(data) - _DIGEST == 2 * size:
        return Clusters(labels=np.frombuffer(data[_DIGEST:], "<u2").astype(np.uint16))
    windows = store.train[: size * (sequence_length + 1)].reshape(size, sequence_length + 1)
    found = Clusters(labels=_found(windows, store.vocabulary, count, seed))
    with suppress(OSError):  # otherwise the next process computes them again
        write_whole(path, bytes.fromhex(found.digest) + found.labels.astype("<u2").tobytes())
    return found


def _found(windows: np.ndarray, vocabulary: int, count: int, seed: int) -> np.ndarray:
    """Assign each window to the nearest of the centers that k-means finds in a sample; return labels, uint16 [N]."""
    from scipy.cluster.vq import vq

    if count == 1:
        return np.zeros(len(windows), np.uint16)
    at_once = min(_SAMPLED, max(1, _TOKENS // windows.shape[1]))
    generator = np.random.default_rng(seed_of(seed, "clusters"))
    picked = np.sort(generator.permutation(len(windows))[:at_once])
    sample = windows[picked].astype(np.int64)
    different = len(np.unique(np.sort(sample, axis=1), axis=0))
    if different < count:
        several = "windows of text" if len(sample) == len(windows) else f"windows of text in a sample of {len(sample)}"
        raise ConfigError(_KEY, f"found {count}, expected at most the {different} distinct {several}")
    features_of = _features(sample, vocabulary)
    centers = _centers(features_of(sample), count, generator)
    parts = (windows[start : start + at_once].astype(np.int64) for start in range(0, len(windows), at_once))
    return np.concatenate([vq(features_of(part), centers)[0] for part in parts]).astype(np.uint16)


def _centers(features: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return the centers [C, F] of features [n, F] by Lloyd's algorithm."""
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
    raise ConfigError(_KEY, f"found {count} clusters, some of them empty, expected fewer clusters, or more text")


def _start(features: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Return initial centers [C, F] by k-means++ (Arthur and Vassilvitskii 2007).

    scipy's own version compares all features with all centers again for each new center.
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


def _features(sample: np.ndarray, vocabulary: int) -> Features:
    """Return a feature function that is fitted to a sample int64 [n, L + 1]: tf-idf weights and the axes of an SVD."""
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
    """Return how many times each token occurs in each window, [n, V]."""
    from scipy.sparse import csr_matrix

    rows = np.repeat(np.arange(len(windows)), windows.shape[1])
    ones = np.ones(windows.size)
    return csr_matrix((ones, (rows, windows.ravel())), shape=(len(windows), vocabulary))
