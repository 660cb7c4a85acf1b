"""Two replicas through several outer rounds, compared bit for bit with SparseLoCo rewritten in numpy with sorting."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from members import begin, patient
from numpy.typing import NDArray
from torch import Tensor, nn

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.model.transformer import ModelShape, shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.error_feedback import ErrorFeedback
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession

Array = NDArray[np.float32]
TIMEOUT = 10.0
ROUNDS = 4
TILE = 8
SHAPE = ModelShape(width=20, layers=2, heads=2, feed_forward=24, vocabulary=50)  # edges cut 8 x 8 tiles
NAMES = ("alpha", "beta")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each member already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _settings(
    density: float,
    bits: int | None,
    momentum: float = 0.0,
    nesterov: bool = False,
    divides_by: Literal["replicas", "senders"] = "replicas",
) -> OuterSettings:
    """Return settings with levels of so many bits, or with signs if `bits` is None."""
    quantiser = {"quantiser": "signs"} if bits is None else {"quantiser": "levels", "value_bits": bits}
    tile = {"density": density, "tile": (TILE, TILE), "error_feedback_decay": 0.9}
    return OuterSettings(
        rounds=ROUNDS,
        learning_rate=0.7,
        momentum=momentum,
        nesterov=nesterov,
        divides_by=divides_by,
        compression=CompressionSettings.model_validate(tile | quantiser),
    )


def _change(name: str, parameter: str, round_: int, shape: torch.Size) -> Tensor:
    """Return the change that a replica's inner loop makes to a parameter in a round."""
    seed = sum(map(ord, f"{name}{parameter}")) * 100 + round_
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


class Plain:
    """SparseLoCo over all replicas at once, one parameter tensor after the other."""

    def __init__(self, checkpoint: RunCheckpoint, settings: OuterSettings) -> None:
        self.settings = settings
        self.theta: dict[str, Array] = {name: t.numpy().copy() for name, t in checkpoint.parameters.items()}
        self.momentum: dict[str, Array] = {}
        self.errors = {name: {p: np.zeros_like(t) for p, t in self.theta.items()} for name in NAMES}

    def round(self, round_: int) -> None:
        for parameter, start in self.theta.items():
            total, senders = np.zeros_like(start), np.zeros_like(start)
            for name in NAMES:
                local = start + _change(name, parameter, round_, torch.Size(start.shape)).numpy()
                sent, kept = self._sent(self.errors[name], parameter, start - local)
                total, senders = total + sent, senders + kept
            is_all = self.settings.divides_by == "replicas"
            mean = direction = total / (np.float32(len(NAMES)) if is_all else np.maximum(senders, 1))
            mu = np.float32(self.settings.momentum)
            if mu > 0:
                before = self.momentum.get(parameter, np.zeros_like(mean))
                direction = self.momentum[parameter] = before * mu + mean
                if self.settings.nesterov:
                    direction = mean + direction * mu
            self.theta[parameter] = start - direction * np.float32(self.settings.learning_rate)

    def _sent(self, errors: dict[str, Array], parameter: str, delta: Array) -> tuple[Array, NDArray[np.bool_]]:
        compression = self.settings.compression
        error = errors[parameter] * np.float32(compression.error_feedback_decay) + delta
        kept = _largest(error, compression.density)
        sent = np.zeros_like(error)
        values = error[kept]
        if compression.quantiser == "signs":
            sent = _signs(error, kept)
        else:
            sent[kept] = values if compression.value_bits == 32 else _rounded(values, compression.value_bits)
        errors[parameter] = error - sent
        return sent, kept


def _chunks(error: Array) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of a tensor's chunks, as a matrix."""
    matrix = np.atleast_2d(error)
    rows, columns = (TILE, TILE) if error.ndim == 2 else matrix.shape
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            yield slice(top, top + rows), slice(left, left + columns)


def _largest(error: Array, density: float) -> NDArray[np.bool_]:
    """Return the mask of each chunk's largest magnitudes. Among equals, earlier ones come first."""
    matrix = np.atleast_2d(error)
    mask = np.zeros(matrix.shape, dtype=bool)
    for where in _chunks(error):
        chunk = matrix[where]
        order = np.argsort(-np.abs(chunk).reshape(-1), kind="stable")
        inside = np.zeros(chunk.size, dtype=bool)
        inside[order[: max(1, int(density * chunk.size + 0.5))]] = True
        mask[where] = inside.reshape(chunk.shape)
    return mask.reshape(error.shape)


def _signs(error: Array, kept: NDArray[np.bool_]) -> Array:
    """Return each chunk's kept values as sign times mean magnitude. The mean is rounded to 1/16 octave."""
    matrix, mask = np.atleast_2d(error).astype(np.float64), np.atleast_2d(kept)
    base, sent = math.floor(math.log2(np.abs(matrix[mask]).mean())), np.zeros_like(matrix)
    for where in _chunks(error):
        mean = np.abs(matrix[where][mask[where]]).mean()
        octaves = np.clip(np.round((math.log2(mean) - base + 8) * 16), 1, 255) / 16
        sent[where] = np.float32(2.0 ** (base - 8 + octaves)) * np.sign(matrix[where]) * mask[where]
    return sent.reshape(error.shape).astype(np.float32)


def _rounded(values: Array, bits: int) -> Array:
    """Round to 2^bits buckets that cover six standard deviations about the mean. Each bucket's level is its mean."""
    exact, count = values.astype(np.float64), 2**bits
    if len(set(values.tolist())) == 1:
        return values
    codes = np.clip(np.round((exact - exact.mean()) / (6 * exact.std() / count) + count / 2), 0, count - 1)
    out = np.zeros_like(values)
    for code in set(codes.tolist()):
        out[codes == code] = np.float32(exact[codes == code].mean())
    return out


class Replicas:
    """Two replicas of one member each, with one exchange."""

    def __init__(self, checkpoint: RunCheckpoint, settings: OuterSettings, folder: Path) -> None:
        blocks = frozenset(shapes_by_block(shapes_of(checkpoint.parameters)))
        roster = Roster(dict(zip(NAMES, NAMES, strict=True)), dict.fromkeys(NAMES, blocks))
        log = ContributionLog(FolderStore(folder))
        self.exchange = Exchange("run", roster, None, settings, log, rules=patient(roster))
        begin(self.exchange, checkpoint)
        self.parameters = {
            name: {p: nn.Parameter(t.clone()) for p, t in checkpoint.parameters.items()} for name in NAMES
        }
        self.outer = {
            name: OuterRound(
                MemberSession(self.exchange, name, name, "run"),
                LocalParameters(own),
                dict(checkpoint.parameters),
                settings,
            )
            for name, own in self.parameters.items()
        }

    def round(self, round_: int) -> None:
        errors: list[HeteroPPError] = []
        threads = [threading.Thread(target=self._member, args=(name, round_, errors), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        assert errors == []

    def _member(self, name: str, round_: int, errors: list[HeteroPPError]) -> None:
        with torch.no_grad():
            for parameter, tensor in self.parameters[name].items():
                tensor.add_(_change(name, parameter, round_, tensor.shape))
        try:
            work = self.exchange.assign(name, round_ - 1)
            self.outer[name].synchronise(round_, work.generation)
        except HeteroPPError as error:
            self.exchange.fail(str(error))
            errors.append(error)


@pytest.mark.parametrize(
    "settings",
    [
        _settings(1 / 8, 2),
        _settings(1 / 32, 1),
        _settings(1 / 8, 4),
        _settings(1 / 8, 32),
        _settings(1.0, 32),
        _settings(1.0, 2),
        _settings(1.0, 32, momentum=0.9, nesterov=True),
        _settings(1 / 8, 2, momentum=0.5),
        _settings(1 / 8, None),
        _settings(1 / 32, None, divides_by="senders"),
        _settings(1 / 8, 32, divides_by="senders"),
    ],
    ids=[
        "2 bits",
        "1 bit",
        "4 bits",
        "exact",
        "dense",
        "dense 2 bits",
        "nesterov",
        "momentum",
        "signs",
        "signs, senders",
        "senders",
    ],
)
def test_rounds_are_the_method_restated(settings: OuterSettings, tmp_path: Path) -> None:
    checkpoint = initial_checkpoint(SHAPE, None, seed=2)
    replicas, plain = Replicas(checkpoint, settings, tmp_path), Plain(checkpoint, settings)
    for round_ in range(1, ROUNDS + 1):
        replicas.round(round_)
        plain.round(round_)
        for parameter, expected in plain.theta.items():
            one, other = (replicas.parameters[name][parameter].detach() for name in NAMES)
            assert one.equal(other), f"{parameter} differs between the replicas after round {round_}"
            assert one.equal(torch.from_numpy(expected)), f"{parameter} after round {round_}"
            for name in NAMES:
                kept, by_hand = replicas.outer[name].error[parameter], plain.errors[name][parameter]
                assert kept.equal(torch.from_numpy(by_hand)), f"error feedback of {parameter}, round {round_}"


def test_dense_and_exact_it_is_a_step_towards_the_mean_of_the_replicas(tmp_path: Path) -> None:
    """Compares with DiLoCo without momentum, computed in float64."""
    checkpoint, settings = initial_checkpoint(SHAPE, None, seed=2), _settings(1.0, 32)
    replicas = Replicas(checkpoint, settings, tmp_path)
    replicas.round(1)
    for parameter, start in checkpoint.parameters.items():
        mean = sum(_change(name, parameter, 1, start.shape).double() for name in NAMES) / len(NAMES)
        found = replicas.parameters["alpha"][parameter].detach().double()
        torch.testing.assert_close(found, start.double() + 0.7 * mean, atol=1e-6, rtol=0, msg=parameter)
        assert (replicas.outer["alpha"].error[parameter] == 0).all()


def test_a_member_that_diverged_says_so_and_sends_nothing(tmp_path: Path) -> None:
    checkpoint, settings = initial_checkpoint(SHAPE, None, seed=2), _settings(1 / 8, 2)
    replicas = Replicas(checkpoint, settings, tmp_path)
    with torch.no_grad():
        replicas.parameters["alpha"]["norm.weight"][3] = float("nan")
    replicas.exchange.assign("alpha", 0)
    with pytest.raises(HeteroPPError, match=r"alpha diverged: norm\.weight is not finite after round 1"):
        replicas.outer["alpha"].synchronise(1)
    assert not list((tmp_path / "round-000001" / "alpha" / "1").glob("norm.*"))


class _Late(Scratch):
    """Makes each copy no earlier than somebody waits for it."""

    waits = threading.Semaphore(0)

    def keep(self, key: Hashable, tensor: Tensor) -> None:
        assert self.waits.acquire(timeout=TIMEOUT)
        super().keep(key, tensor)


def test_error_feedback_changes_after_it_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are made beside the selection, and are those from before the contribution."""
    error = {"a": torch.ones(3), "b": torch.full((4,), 2.0)}
    before = {name: tensor.clone() for name, tensor in error.items()}
    feedback, result = ErrorFeedback(error, OuterSettings(rounds=1), _Late(tmp_path)), Future[None].result

    def waited_for(copy: Future[None]) -> None:
        _Late.waits.release()
        result(copy)

    monkeypatch.setattr(Future, "result", waited_for)
    feedback.begin(1, None)
    for name in error:
        feedback.to_change(name).zero_()
    feedback.take_back()
    for name, tensor in before.items():
        assert error[name].equal(tensor)
