"""All attacks by the name that `research.attacks.attack` gives them."""

from __future__ import annotations

from hetero_pp.messages.messages_pb2 import Losses
from hetero_pp.research.attacks import omniscient, plain, training
from hetero_pp.research.attacks.attack import Attack


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
    "no_work": Attack(plain.no_work),
    "stale_copy": Attack(plain.stale_copy),
    "copy_of_another": Attack(plain.copy_of_another, needs_honest=True),
    "noise": Attack(plain.noise),
    "sign_flip": Attack(plain.sign_flip),
    "flip_by_4": Attack(plain.flip_by_4),
    "scaled_by_10": Attack(plain.scaled_by_10),
    "drift": Attack(plain.drift, needs_honest=True),
    "sybils": Attack(plain.sybils),
    "other_text": Attack(text=training.other_text),
    "backdoor": Attack(text=training.with_triggers),
    "flipped_stage": Attack(activations=training.flipped),
    "alie": Attack(omniscient.alie, needs_honest=True),
    "min_max": Attack(omniscient.min_max, needs_honest=True),
    "inner_product": Attack(omniscient.inner_product, needs_honest=True),
    "lying_validator": Attack(plain.sign_flip, losses=lied),
}
"""Attacks by name. To add one, write its function and add a line."""
