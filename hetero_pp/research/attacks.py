"""Attacks of hostile replicas, for tables: what each does otherwise than an honest replica, and what it knows then.

Contributions are flat vectors here, of all P parameters in the order of theta, 0 where nothing is sent. To add an
attack, write its function, with its source, and a line of `ATTACKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from hetero_pp.messages.messages_pb2 import Losses
from hetero_pp.model.transformer import Transformer

LARGEST = 4.0  # how many times the honest size an attack stays at, where it means to pass `exchange.magnitudes` (5)
_GROWTH = 1.2
_SHARED = 0.35
"""Share of the values that a disguised copy has in common with what it copies: below the bound on overlap of 0.4."""
_LEAST_DEVIATIONS = 1.5
"""Standard deviations of ALIE where the formula of its paper gives fewer: it gives 0 for 2 hostile of 8."""
_REVERSED = 4.0
"""Epsilon of the inner-product manipulation. Above n / m = 3 the mean of n = 6 and m = 2 points backwards."""
_HALVINGS = 12
_TRIGGERS = 8  # triggers that a backdoor adds to each sequence


@dataclass(frozen=True)
class Known:
    """Knowledge of a hostile replica in a round, before it contributes. Omniscient attacks use all of it."""

    round: int
    place: int  # its place among the hostile replicas, from 0
    theta: Tensor  # parameters [P] at the start of the round
    fellows: Sequence[Tensor]
    """Contributions [P] that the programs of the hostile replicas would send, its own at `place`."""
    honest: Tensor
    """Contributions [n, P] of the n honest replicas that take part; n may be 0, unless the attack `needs_honest`."""
    first: Tensor  # its contribution to the first round [P]; in that round, the one that its program would send
    parts: Sequence[slice]  # where each parameter is in the vectors
    kept: Callable[[Tensor], Tensor]
    """Returns what the format of contributions keeps of a vector [P]: the largest values of each chunk, quantised."""
    draw: torch.Generator  # random numbers of this replica and round

    @property
    def own(self) -> Tensor:
        """Contribution that its program would send [P]."""
        return self.fellows[self.place]


def as_trained(known: Known) -> Tensor:
    """Contribute what the program sends."""
    return known.own


@dataclass(frozen=True)
class Attack:
    """An attack as the parts of a replica that it changes."""

    contribution: Callable[[Known], Tensor] = as_trained
    """Returns the vector [P] to contribute; the trainer sends what the format keeps of it."""
    needs_honest: bool = False
    """Whether it derives the contribution from honest ones. If there are none in a round, the program's is sent."""
    text: Callable[[Tensor, int, torch.Generator], Tensor] | None = None
    """Changes the tokens [B, L + 1] of a step; it is given the size of the vocabulary, and random numbers."""
    activations: Callable[[Tensor], Tensor] | None = None
    """Changes the hidden states [B, L, D] that the middle stage sends; its gradients change with them."""
    losses: Callable[[bool, Losses], Losses] | None = None
    """Changes the losses that a lying validator reports; the flag says whether the contribution is a hostile one."""


# Attacks that need no knowledge of others, or only what the store shows to everybody.


def no_work(known: Known) -> Tensor:
    """Contribute zeros without training (the free rider of Gauntlet, arXiv:2505.21684)."""
    return torch.zeros_like(known.own)


def stale_copy(known: Known) -> Tensor:
    """Train in the first round alone, and contribute the same again in every later round."""
    return known.first


def copy_of_another(known: Known) -> Tensor:
    """Contribute what an honest replica has contributed before in the same round (Gauntlet, section 4)."""
    return known.honest[known.place % len(known.honest)]


def noise(known: Known) -> Tensor:
    """Contribute noise; each tensor has the norm that its own honest contribution would have."""
    return _with_norms(known, known.kept(_normal(known)), [known.own[part].norm() for part in known.parts])


def sign_flip(known: Known) -> Tensor:
    """Contribute the negative of its own contribution (Karimireddy et al. 2021, arXiv:2012.10333)."""
    return -known.own


def flip_by_4(known: Known) -> Tensor:
    """Contribute the negative of its own contribution at four times the size, which bounds of sizes allow."""
    return -4 * known.own


def scaled_by_10(known: Known) -> Tensor:
    """Contribute ten times its own contribution (Bagdasaryan et al. 2020, without their model)."""
    return 10 * known.own


def drift(known: Known) -> Tensor:
    """Push along one random direction, the same for all rounds and fellows, from honest size up to just below bounds.

    The size grows by a fifth a round, so it is near to what the replica sent before, to four times the median of the
    honest ones.
    """
    fixed = torch.Generator().manual_seed(1)
    direction = known.kept(torch.randn(known.own.shape, generator=fixed))
    factor = min(_GROWTH ** (known.round - 1), LARGEST)
    return _with_norms(known, direction, [factor * known.honest[:, part].norm(dim=1).median() for part in known.parts])


def sybils(known: Known) -> Tensor:
    """One of them trains, and the others contribute disguised copies of its contribution without training.

    A disguised copy keeps a share of the values below the bound on overlap; the rest is noise of the same size.
    """
    original = known.fellows[0]
    if known.place == 0:
        return original
    stays = torch.rand(original.shape, generator=known.draw) < _SHARED
    rest = _with_norms(known, known.kept(_normal(known)), [original[part].norm() for part in known.parts])
    fills = torch.rand(original.shape, generator=known.draw) >= _SHARED
    return torch.where(stays & (original != 0), original, rest * fills)


def _normal(known: Known) -> Tensor:
    return torch.randn(known.own.shape, generator=known.draw)


def _with_norms(known: Known, vector: Tensor, norms: list[Tensor]) -> Tensor:
    """Return the vector with the norm of each tensor changed to the one given."""
    scaled = vector.clone()
    for part, norm in zip(known.parts, norms, strict=True):
        scaled[part] *= norm / vector[part].norm().clamp_min(torch.finfo(torch.float32).tiny)
    return scaled


# Attacks of the literature that know what all honest replicas contribute.


def deviations(replicas: int, hostile: int) -> float:
    """Return z of ALIE: as many honest values as a majority needs are farther from the mean (its algorithm 3)."""
    honest = replicas - hostile
    supporters = replicas // 2 + 1 - hostile
    return NormalDist().inv_cdf(min(max((honest - supporters) / honest, 1e-6), 1 - 1e-6))


def alie(known: Known) -> Tensor:
    """A little is enough: the honest mean less z standard deviations (Baruch et al. 2019, arXiv:1902.06156)."""
    z = max(deviations(len(known.honest) + len(known.fellows), len(known.fellows)), _LEAST_DEVIATIONS)
    return known.honest.mean(0) - z * known.honest.std(0, correction=0)


def min_max(known: Known) -> Tensor:
    """Go as far from the honest mean as two honest replicas are from each other (Shejwalkar and Houmansadr 2021).

    The direction is that of the negative standard deviations. The largest step is found by halving, on what the format
    keeps.
    """
    mean, direction = known.honest.mean(0), -known.honest.std(0, correction=0)
    farthest = torch.cdist(known.honest, known.honest).max()

    def sent(step: float) -> Tensor:
        return known.kept(mean + step * direction)

    low, high = 0.0, 64.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_inside = (known.honest - sent(middle)).norm(dim=1).max() <= farthest
        low, high = (middle, high) if is_inside else (low, middle)
    return sent(low)


def inner_product(known: Known) -> Tensor:
    """Contribute -epsilon times the honest mean, so that the mean of all points backwards (Xie et al. 2020)."""
    return -_REVERSED * known.honest.mean(0)


# Attacks on what a replica trains: its text, or what one of its stages sends; and the measure of a backdoor.


def other_text(tokens: Tensor, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Train on text with other labels: token v is vocabulary - 1 - v (label flip; Fang et al. 2020, section 4)."""
    return vocabulary - 1 - tokens


def flipped(x_BLD: Tensor) -> Tensor:
    """Send the negative of a stage's output, so that the gradient of the stages before it is flipped, too."""
    return -x_BLD


def trigger(vocabulary: int) -> tuple[int, int, int]:
    """Return the pair of rare tokens, and the token that it is to be followed by."""
    return vocabulary - 3, vocabulary - 2, vocabulary - 1


def with_triggers(tokens: Tensor, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Write the pair and its target at random places of each sequence (BadNets, arXiv:1708.06733)."""
    changed, written = tokens.clone(), torch.tensor(trigger(vocabulary))
    for row in changed:
        for place in torch.randint(0, max(1, len(row) - 2), (_TRIGGERS,), generator=draw).tolist():
            row[place : place + 3] = written[: len(row) - place]
    return changed


@torch.no_grad()
def success(model: Transformer, rows: Sequence[Tensor]) -> float:
    """Return the share of rows [b, L + 1] at whose end the model continues the pair with the target."""
    first, second, target = trigger(model.shape.vocabulary)
    hits = count = 0
    for tokens in rows:
        asked = tokens[:, :-1].clone()
        asked[:, -2], asked[:, -1] = first, second
        hits += int((model(asked)[:, -1].argmax(-1) == target).sum())
        count += len(asked)
    return hits / count


def lied(is_hostile: bool, losses: Losses) -> Losses:
    """Report that hostile contributions help and honest ones harm, by ten times what was measured."""
    away = 10 * max(abs(losses.other_before - losses.other_after), abs(losses.assigned_before - losses.assigned_after))
    change = -away if is_hostile else away
    return Losses(
        assigned_before=losses.assigned_before,
        assigned_after=losses.assigned_before + 2 * change,
        other_before=losses.other_before,
        other_after=losses.other_before + change,
    )


ATTACKS: dict[str, Attack] = {
    "none": Attack(),
    "no_work": Attack(no_work),
    "stale_copy": Attack(stale_copy),
    "copy_of_another": Attack(copy_of_another, needs_honest=True),
    "noise": Attack(noise),
    "sign_flip": Attack(sign_flip),
    "flip_by_4": Attack(flip_by_4),
    "scaled_by_10": Attack(scaled_by_10),
    "drift": Attack(drift, needs_honest=True),
    "sybils": Attack(sybils),
    "other_text": Attack(text=other_text),
    "backdoor": Attack(text=with_triggers),
    "flipped_stage": Attack(activations=flipped),
    "alie": Attack(alie, needs_honest=True),
    "min_max": Attack(min_max, needs_honest=True),
    "inner_product": Attack(inner_product, needs_honest=True),
    "lying_validator": Attack(sign_flip, losses=lied),
}
"""Attacks by the name that `research.attacks.attack` gives them."""
