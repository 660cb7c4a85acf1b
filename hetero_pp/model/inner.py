"""Inner loop: its length, and its optimizers, with clipping by the norm of the whole replica.

AdamW: Het-PP Table 9. Muon trains the matrices of layers, and AdamW everything else. The learning rate is the same, as
Muon's steps are scaled to the size of AdamW's (torch.optim.Muon, Jordan et al. 2024; MuLoCo, Therien et al. 2025). An
optimizer's state is kept across outer rounds. Steps are counted over the whole run, so the learning rate is the same
function of (round, step) in every process (hetero_pp/model/learning_rates.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Beta, NotPartOf, Seconds, Settings
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.messages.report_bounds import MOST_RATE, MOST_SECONDS, MOST_STEPS
from hetero_pp.model.learning_rates import ByRounds, BySteps, LearningRates
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING, LAYERS

_FUSES = ("cpu", "cuda", "mps", "xpu", "meta")  # kinds of devices on which torch has AdamW as one kernel
_MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the tensors that the optimizers keep for a parameter."""
_ROWS = 4096  # rows of the embedding that weight decay changes at once


REMEDIES = "lower inner.learning_rate, inner.clip_norm or outer.learning_rate, or raise inner.warmup_steps"
"""Settings that help a run that diverges."""


class InnerSettings(Settings):
    """Inner loop of a round: a number of steps, or as many as fit into a given time."""

    steps: int | None = Field(
        10, ge=1, le=MOST_STEPS, description="inner steps per outer round (H in the papers); null with `seconds`"
    )
    seconds: Seconds | None = Field(
        None,
        gt=0,
        le=MOST_SECONDS,
        description="duration of the inner steps of a round, instead of `steps`: each "
        "replica takes as many as fit, at least one",
    )
    learning_rate: Annotated[float, NotPartOf.PAST] = Field(1e-2, gt=0, le=MOST_RATE)
    final_learning_rate_share: Annotated[float, NotPartOf.PAST] = Field(
        0.1, ge=0, le=1, description="learning rate at the end of the cosine, as a share of the peak"
    )
    warmup_steps: Annotated[int | None, NotPartOf.PAST] = Field(
        10, ge=0, description="steps of linear warmup, with `steps`"
    )
    warmup_rounds: Annotated[float | None, NotPartOf.PAST] = Field(
        None, ge=0, description="rounds of linear warmup with `seconds`; 1 by default"
    )
    optimizer: Literal["adamw", "sgd", "muon"] = Field(
        "adamw",
        description="optimizer of the inner steps; `muon` trains the matrices of layers, and AdamW everything else",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of SGD (by default none) or Muon (by default 0.95)"
    )
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="weight decay; norms have none")
    clip_norm: float | None = Field(
        1.0, gt=0, description="largest norm of the replica's whole gradient; null: no clipping"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_what_goes_with_seconds(cls, values: Any) -> Any:
        """Set the fields that count steps to null if `seconds` is given."""
        if not isinstance(values, dict) or values.get("seconds") is None:
            return values
        return {"steps": None, "warmup_steps": None, "warmup_rounds": 1.0, **values}

    def check(self) -> None:
        """Raise ConfigError unless a round has one length with its own warm-up, and the settings fit the optimizer."""
        if self.momentum is not None and self.optimizer == "adamw":
            found = f"found {self.momentum:g} with `optimizer: adamw`, which has its own in `betas`"
            raise ConfigError(("inner", "momentum"), f"{found}, expected none, or `optimizer: sgd` or `muon`")
        if self.steps is not None and self.seconds is not None:
            both = f"found {self.seconds:g} s and {self.steps} `steps`"
            raise ConfigError(("inner", "seconds"), f"{both}, expected one of them: set the other to null")
        if self.steps is None and self.seconds is None:
            raise ConfigError(("inner", "steps"), "found nothing, expected `steps` or `seconds`")
        length, wanted, other = ("steps", "warmup_steps", "warmup_rounds")
        if self.seconds is not None:
            length, wanted, other = ("seconds", "warmup_rounds", "warmup_steps")
        if getattr(self, other) is not None:
            raise ConfigError(("inner", other), f"found {getattr(self, other):g}, expected `{wanted}` with `{length}`")
        if getattr(self, wanted) is None:
            raise ConfigError(("inner", wanted), f"found nothing, expected a number with `{length}`")

    @property
    def length(self) -> str:
        """Length of a round's inner loop, in words."""
        if self.steps is not None:
            return format_count(self.steps, "inner step")
        return f"as many inner steps as fit into {format_seconds(self.seconds or 0.0)}"

    def require_steps(self, why: str) -> int:
        """Return H. Raises ConfigError with the reason `why` if a round lasts a given time."""
        if self.steps is None:
            raise ConfigError(("inner", "seconds"), f"found {self.seconds:g} s, expected `steps`: {why}")
        return self.steps

    def rates(self, total_steps: int, share: float = 1.0) -> LearningRates:
        """Return the learning rates of a run of so many steps. `share` of `warmup_steps` is the replica's warm-up."""
        assert self.warmup_steps is not None, "a round has a fixed duration"
        return BySteps(self.learning_rate, self.final_learning_rate_share, share * self.warmup_steps, total_steps)

    def rates_in(self, round_: int, rounds: float, first: int, expected: int | None) -> LearningRates:
        """Return the learning rates of one of `rounds` rounds. ByRounds explains the arguments."""
        warmup, share = self.warmup_rounds, self.final_learning_rate_share
        if warmup is None:  # a round has a fixed number of steps
            warmup = (self.warmup_steps or 0) / (self.steps or 1)
        return ByRounds(self.learning_rate, share, warmup, rounds, round_, first, expected)

    def first_rates(self, total_steps: int | None) -> LearningRates:
        """Return the initial learning rates: those of the run's steps, or of its first round if these are not known."""
        return self.rates_in(1, 1, 0, None) if total_steps is None else self.rates(total_steps)


class _Eager(Optimizer):
    """Base of AdamW, SGD and Muon of torch.optim, without what only torch.compile needs: no optimizer is compiled here.

    torch wraps their methods for torch.compile. The first call of a wrapper imports torch._dynamo and SymPy, which
    takes more than a second of CPU time in each process. The arithmetic is torch's.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(_Eager, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Muon(_Eager, torch.optim.Muon):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


class InnerOptimizer:
    """Optimizer of the parameters of one replica, or of one stage of it.

    In a replica with compressed boundaries T_perp is fixed during the inner loop. So the embedding's weight decay acts
    only on T_S = TE - T_perp. Set `perpendicular` to T_perp [V, D] after every outer round.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: InnerSettings, total_steps: int | None
    ) -> None:
        self.settings = settings
        self.total_steps = total_steps
        """None if it is not known. Then each round has its own learning rates, set by `follow`."""
        self.rates = settings.first_rates(total_steps)
        self.defers = False  # whether the outer round takes the steps, because gradients are averaged
        self._named = parameters
        self._parameters = list(parameters.values())
        self._embedding = parameters.get(EMBEDDING)
        self._perpendicular: Tensor | None = None
        self.optimizers = self._build()

    def _build(self) -> list[Optimizer]:
        groups, settings = list(self._groups()), self.settings
        if settings.optimizer == "sgd":
            return [SGD(groups, lr=settings.learning_rate, momentum=settings.momentum or 0.0)]
        if settings.optimizer == "adamw":
            return self._adamw(groups)
        hidden = [group for group in groups if group.pop("is_hidden", False)]
        others = self._adamw([group for group in groups if group not in hidden])
        rate, momentum = settings.learning_rate, 0.95 if settings.momentum is None else settings.momentum
        muons = [Muon([one], lr=rate, momentum=momentum, adjust_lr_fn="match_rms_adamw") for one in hidden]
        return [*muons, *others]

    def _adamw(self, groups: list[dict[str, Any]]) -> list[Optimizer]:
        rate, betas, epsilon = self.settings.learning_rate, self.settings.betas, self.settings.epsilon
        is_fused = all(parameter.device.type in _FUSES for parameter in self._parameters)
        return [AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=is_fused)] if groups else []

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield groups of matrices, norms, and the embedding."""
        decay = self.settings.weight_decay
        matrices = {name: p for name, p in self._named.items() if self._is_matrix(p) and name != EMBEDDING}
        hidden: list[nn.Parameter] = []
        if self.settings.optimizer == "muon":
            hidden = [matrices.pop(name) for name in list(matrices) if name.startswith(LAYERS)]
        found: list[dict[str, Any]] = [
            {"params": list(matrices.values()), "weight_decay": decay},
            {"params": hidden, "weight_decay": decay, "is_hidden": True},
            {"params": [p for p in self._parameters if not self._is_matrix(p)], "weight_decay": 0.0},
        ]
        if self._embedding is not None:
            found.append({"params": [self._embedding], "weight_decay": decay, "embeds": True})
        return (group for group in found if group["params"])

    def _is_matrix(self, parameter: Tensor) -> bool:
        return parameter.ndim > 1

    @property
    def perpendicular(self) -> Tensor | None:
        """T_perp [V, D] of the synchronized embedding; None in a replica without compressed boundaries."""
        return self._perpendicular

    @perpendicular.setter
    def perpendicular(self, table: Tensor | None) -> None:
        self._perpendicular = table
        self._take_perpendicular(table)

    def _take_perpendicular(self, table: Tensor | None) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group.get("embeds"):
                    group["weight_decay"] = self.settings.weight_decay if table is None else 0.0

    def follow(self, rates: LearningRates) -> None:
        """Use other learning rates from the next step on."""
        self.rates = rates

    def state(self) -> list[dict[str, Any]]:
        """Return moments and step counts, as tensors that are still in use."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load(self, state: list[dict[str, Any]]) -> None:
        """Load the result of `state` into an optimizer of the same parameters."""
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)

    def moments(self) -> dict[str, Tensor]:
        """Return moments and step counts by `<optimizer>.<parameter>.<name>`, as tensors that are still in use."""
        return {
            f"{number}.{index}.{name}": value
            for number, saved in enumerate(self.state())
            for index, values in saved["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Load the result of `moments`; settings of the optimizers stay. Raises ValueError for tensors of others."""
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in self.optimizers]
        for key, value in moments.items():
            number, index, name = key.split(".")
            parameters = [one for group in self.optimizers[int(number)].param_groups for one in group["params"]]
            expected = () if name == "step" else parameters[int(index)].shape
            if name not in _MOMENTS or value.shape != expected:
                raise ValueError(f"{key} {list(value.shape)} is no moment of {list(parameters[int(index)].shape)}")
            states[int(number)].setdefault(int(index), {})[name] = value.clone()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of these parameters."""
        return nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])

    def step(self, step: int, replica_norm: Tensor) -> float:
        """Clip by the whole replica's norm, step, clear the gradients; return the learning rate.

        If it `defers`, gradients stay unchanged, because the outer round takes the step.
        """
        if self.defers:
            return self.rates.at(step)
        if self.settings.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters, self.settings.clip_norm, replica_norm)
        rate = self.rates.at(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._before(rate)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return rate

    @torch.no_grad()
    def _before(self, rate: float) -> None:
        """Apply weight decay to T_S in a replica with compressed boundaries."""
        embedding, table = self._embedding, self._perpendicular
        if embedding is not None and table is not None:
            decay = rate * self.settings.weight_decay
            for start in range(0, len(table), _ROWS):  # no third table
                rows = embedding[start : start + _ROWS]
                rows.sub_((rows - table[start : start + _ROWS]).mul_(decay))


class SubspaceOptimizer(InnerOptimizer):
    """Inner optimizer that knows the basis U [D, K] of the replica's boundaries, and keeps T_S [V, D] in the subspace.

    Het-PP section 2.4 constrains the trained part T_S of the embedding to the subspace and leaves open how it is
    trained (`boundary.embedding`). Between two rounds T_perp is fixed, so the embedding is T_perp + T_S.

    With `coefficients` it trains C [V, K] of T_S = C U^T. With `projected` it trains the table [V, D], and projects T_S
    onto the subspace after each step. With `free` it is an InnerOptimizer.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: InnerSettings,
        total_steps: int | None,
        basis: Tensor,
        embedding: EmbeddingTraining,
    ) -> None:
        self.basis = basis  # U [D, K]; it may change only with a new split
        self.trains: EmbeddingTraining = embedding
        self.coefficients: nn.Parameter | None = None
        """C [V, K], if they are trained; set from the embedding with each `perpendicular`."""
        if embedding == "coefficients" and EMBEDDING in parameters:
            self.coefficients = nn.Parameter(parameters[EMBEDDING].detach() @ basis)
        super().__init__(parameters, settings, total_steps)

    @property
    def embedding(self) -> nn.Parameter:
        """TE [V, D]."""
        return self._named[EMBEDDING]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for group in super()._groups():
            is_own = self.coefficients is not None and group.get("embeds", False)
            yield group | {"params": [self.coefficients]} if is_own else group

    def _take_perpendicular(self, table: Tensor | None) -> None:
        if self.coefficients is None:
            super()._take_perpendicular(table)
        elif self._embedding is not None:
            with torch.no_grad():
                self.coefficients.copy_(self._embedding @ self.basis)

    @torch.no_grad()
    def _before(self, rate: float) -> None:
        """Project the embedding's gradient onto its coefficients, or apply weight decay to T_S."""
        embedding = self._embedding
        is_split = embedding is not None and self._perpendicular is not None
        if is_split and self.coefficients is not None and embedding is not None and embedding.grad is not None:
            self.coefficients.grad = embedding.grad @ self.basis
        else:
            super()._before(rate)

    def step(self, step: int, replica_norm: Tensor) -> float:
        rate = super().step(step, replica_norm)
        if not self.defers:
            self._after()
        return rate

    @torch.no_grad()
    def _after(self) -> None:
        """Put the embedding together again: T_perp and the trained T_S."""
        embedding, table, basis = self._embedding, self._perpendicular, self.basis
        if embedding is None or table is None:
            return
        if self.coefficients is not None:
            embedding.copy_(table + self.coefficients @ basis.T)
        elif self.trains == "projected":
            embedding.copy_(table + ((embedding - table) @ basis) @ basis.T)


def inner_optimizer(
    parameters: Mapping[str, nn.Parameter],
    settings: InnerSettings,
    total_steps: int | None,
    basis: Tensor | None,
    embedding: EmbeddingTraining,
) -> InnerOptimizer:
    """Return the inner optimizer of a replica, or of a stage; `basis` [D, K] is None if no boundary is compressed."""
    if basis is None or embedding == "free" or EMBEDDING not in parameters:
        return InnerOptimizer(parameters, settings, total_steps)
    return SubspaceOptimizer(parameters, settings, total_steps, basis, embedding)
