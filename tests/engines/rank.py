"""Program of one rank of test_contract.py: `rank.py ENGINE [SETTINGS, ...] FOLDER`.

It puts an engine with each of the settings through the contract, beside a plain PyTorch loop in the same process. Then
it writes the differences to FOLDER/<index of the settings>-<rank>.json.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import torch
from members import begin, patient
from plain_loop import PlainLoop

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.spec import Roster
from hetero_pp.config.topology import DatacenterReplica, EngineName
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelSettings, Transformer, initialise, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, decode_blob
from hetero_pp.pseudo_gradient.rows import rows_of
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.build import build_engine
from replica_groups.engines.engine import Engine
from replica_groups.engines.plain import PlainEngine
from replica_groups.engines.ranks import Ranks, init_ranks
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession

SHAPE = ModelSettings(width=64, layers=2, heads=4, kv_heads=2, feed_forward=160, vocabulary=200).resolve(None)
INNER = InnerSettings(learning_rate=1e-3, warmup_steps=2)
CHANGED = INNER.model_copy(update={"learning_rate": 4e-3, "final_learning_rate_share": 0.3})
STEPS, BATCH, MICRO_BATCHES, TILE = 8, 8, 2, (64, 64)


def tokens_of(seed: int) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocabulary, (BATCH, 17), generator=torch.Generator().manual_seed(seed))


def _model() -> Transformer:
    model = Transformer(SHAPE)
    initialise(model, 1)
    return model


def build(engine: EngineName, settings: dict[str, Any], ranks: Ranks, micro_batches: int = MICRO_BATCHES) -> Engine:
    replica = DatacenterReplica.model_validate(
        {
            "kind": "datacenter",
            "name": "dc",
            "engine": engine,
            "batch_size": BATCH,
            "micro_batches": micro_batches,
            "torchtitan": settings if engine == "torchtitan" else {},
            "deepspeed": settings if engine == "deepspeed" else {},
        }
    )
    return build_engine(replica, SHAPE, dict(_model().named_parameters()), INNER, STEPS, ranks)


def _apart(engine: Engine, plain: PlainLoop, ranks: Ranks) -> float:
    """Return the largest difference of any parameter over this rank's rows.

    Check that the rows are those of `rows_of`.
    """
    largest = 0.0
    for name, shape in plain.shapes.items():
        rows = rows_of(shape, TILE, ranks.rank, ranks.world)
        ours, theirs = engine.read(name, rows).cpu(), plain.read(name, rows)
        assert ours.shape == theirs.shape and ours.dtype == torch.float32, name
        if ours.numel():
            largest = max(largest, (ours - theirs).abs().max().item())
    return largest


def _gradients(engine: Any, plain: PlainLoop) -> float:
    """Return the largest difference of any gradient of a step with one micro-batch."""
    rows = tokens_of(50)
    if isinstance(engine, PlainEngine):
        engine.whole.backward(rows, 0)
    elif type(engine).__name__ == "TitanEngine":
        engine.backward(rows, rows[:, 1:].numel())
    else:
        engine.backward(rows)
    largest = 0.0
    plain.backward(rows, micro_batches=1)
    for name in plain.shapes:
        largest = max(largest, (engine.read_gradient(name) - plain.read_gradient(name)).abs().max().item())
    return largest


class Round:
    """Outer rounds of two replicas with equal weights: the engine on all ranks, and plain PyTorch on the first rank."""

    settings = OuterSettings.model_validate(
        {"rounds": 2, "momentum": 0.5, "nesterov": True, "compression": {"quantiser": "levels"}}
    )

    def __init__(self, engine: Engine, plain: PlainLoop, start: dict[str, torch.Tensor], folder: Path, ranks: Ranks):
        self.ranks, self.shapes = ranks, plain.shapes
        blocks = frozenset(shapes_by_block(plain.shapes))
        roster = Roster({"engine": "engine", "plain": "plain"}, {"engine": blocks, "plain": blocks})
        log = ContributionLog(FolderStore(folder / "log"))
        self.exchange = Exchange("run", roster, None, self.settings, log, rules=patient(roster))
        if ranks.is_first:
            begin(self.exchange, RunCheckpoint(0, start, None))
        exchange = self.exchange if ranks.is_first else None
        self.shared = MemberSession(exchange, "engine", "engine", "run", ranks=ranks)
        self.sharded = OuterRound(self.shared, engine, start, self.settings)
        self.whole = OuterRound(MemberSession(self.exchange, "plain", "plain", "run"), plain, start, self.settings)

    def synchronise(self, round_: int) -> None:
        work = self.shared.assign("engine", round_ - 1)
        if not self.ranks.is_first:
            self.sharded.synchronise(round_, work.generation)
            return
        self.exchange.assign("plain", round_ - 1)
        other = threading.Thread(target=self.whole.synchronise, args=(round_,))
        other.start()
        self.sharded.synchronise(round_, work.generation)
        other.join()

    def contributions_apart(self, round_: int) -> tuple[bool, float]:
        """Return whether both kept the same positions, and the difference of the values relative to the largest."""
        same, apart = True, 0.0
        for block, shapes in shapes_by_block(self.shapes).items():
            ours, theirs = (
                decode_blob(
                    self.exchange.fetch(replica, round_, replica, block),
                    BlobAddress("run", round_, replica, block),
                    shapes,
                    self.settings.compression,
                )
                for replica in ("engine", "plain")
            )
            for name in shapes:
                same = same and torch.equal(ours[name].indices, theirs[name].indices)
                gap = (ours[name].values - theirs[name].values).abs().max() / theirs[name].values.abs().max()
                apart = max(apart, gap.item())
        return same, apart


def _outer_rounds(engine: Engine, plain: PlainLoop, folder: Path, ranks: Ranks) -> dict[str, object]:
    """Train two rounds from equal weights. After each, both replicas must have the same bits."""
    start = {name: engine_rows.clone() for name, engine_rows in plain.module.state_dict().items()}
    rounds = Round(engine, plain, start, folder, ranks)
    equal = []
    for round_ in (1, 2):
        for index, (name, shape) in enumerate(plain.shapes.items()):
            moved = torch.randn(shape, generator=torch.Generator().manual_seed(100 * round_ + index)) * 0.01
            for one in (engine, plain):
                one.write(name, start[name] + moved)
        engine.finish_writing()
        rounds.synchronise(round_)
        if ranks.is_first:
            wholes = {name: rounds.whole.theta[name] for name in plain.shapes}
        for name, part in rounds.sharded.theta.items():
            whole = ranks.gather_rows(part, plain.shapes[name][0])
            held = engine.read(name, rows_of(plain.shapes[name], TILE, ranks.rank, ranks.world))
            equal.append(bool(held.equal(part)) and (not ranks.is_first or whole.equal(wholes[name])))
            plain.write(name, whole)  # other ranks of the plain replica take no part in rounds
        start = {name: ranks.gather_rows(part, plain.shapes[name][0]) for name, part in rounds.sharded.theta.items()}
    kept = sum(tensor.numel() for tensor in rounds.sharded.error.values())
    found: dict[str, object] = {"equal": all(equal), "kept": kept}
    if ranks.is_first:
        found["contributions"] = [rounds.contributions_apart(round_) for round_ in (1, 2)]
    return found


def _undone(engine: Engine, steps: range, ranks: Ranks) -> list[list[tuple[float, float, float]]]:
    """Take all steps but the last, undo them, take all steps and undo them. Return the results of both attempts."""
    wholes = {
        name: ranks.gather_rows(engine.read(name, rows_of(shape, TILE, ranks.rank, ranks.world)).clone(), shape[0])
        for name, shape in engine.shapes.items()
    }
    engine.remember(True)
    found = []
    for last in (steps.stop - 1, steps.stop):
        found.append([engine.inner_step(tokens_of(step), step) for step in range(steps.start, last)])
        for name, whole in wholes.items():
            engine.write(name, whole)
        engine.finish_writing()
        engine.undo()
    return found


def _contract(name: EngineName, settings: dict[str, Any], folder: Path, ranks: Ranks) -> dict[str, object]:
    """Check start, gradients, steps, evaluation, saving and loading, writing, outer rounds, and a step after them."""
    engine = build(name, settings, ranks)
    plain = PlainLoop(_model(), INNER, STEPS, MICRO_BATCHES)
    found: dict[str, object] = {"names": list(engine.shapes) == sorted(plain.shapes)}
    found["start"] = _apart(engine, plain, ranks)
    found["gradients"] = _gradients(build(name, settings, ranks, micro_batches=1), plain)
    validation = [tokens_of(90)[:3], tokens_of(91)[:1]]
    pairs = [(engine.inner_step(tokens_of(step), step), plain.inner_step(tokens_of(step), step)) for step in range(3)]
    found["steps"], found["done"] = pairs, engine.done
    found["trained"] = _apart(engine, plain, ranks)
    found["evaluation"] = [engine.evaluate(validation), plain.evaluate(validation)]
    found["undone"] = [_undone(build(name, settings, ranks), range(2), ranks), _undone(engine, range(3, 5), ranks)]
    engine.save(folder / "saved")
    following = [engine.inner_step(tokens_of(step), step) for step in range(3, 5)]
    found["following"] = [following, [plain.inner_step(tokens_of(step), step) for step in range(3, 5)]]
    again = build(name, settings, ranks)
    again.load(folder / "saved")
    again.follow(INNER.rates(STEPS))
    found["resumed"] = [following, [again.inner_step(tokens_of(step), step) for step in range(3, 5)]]
    found["outer"] = _outer_rounds(engine, plain, folder, ranks)
    found["evaluation after"] = [engine.evaluate(validation), plain.evaluate(validation)]
    for own, shape in plain.shapes.items():  # a round may start from other parameters than those that were evaluated
        whole = 0.9 * plain.read(own, range(shape[0]))
        for one in (engine, plain):
            one.write(own, whole)
    engine.finish_writing()
    engine.follow(CHANGED.rates(2 * STEPS))
    plain.inner, plain.total_steps = CHANGED, 2 * STEPS
    found["step after"] = [engine.inner_step(tokens_of(7), 5), plain.inner_step(tokens_of(7), 5)]
    found["changed"] = _apart(engine, plain, ranks)
    return found


def main(name: EngineName, cases: list[dict[str, Any]], folder: Path) -> None:
    """Run the contracts one after another."""
    torch.set_num_threads(1)
    ranks = init_ranks(torch.device("cpu"))
    for index, settings in enumerate(cases):
        own = folder / str(index)
        if ranks.is_first:
            own.mkdir()
        ranks.gather(0.0)  # the folder exists before other ranks write to it
        (folder / f"{index}-{ranks.rank}.json").write_text(json.dumps(_contract(name, settings, own, ranks)))
    ranks.close()


if __name__ == "__main__":
    names: dict[str, EngineName] = {name: name for name in get_args(EngineName)}
    main(names[sys.argv[1]], json.loads(sys.argv[2]), Path(sys.argv[3]))
