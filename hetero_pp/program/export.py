"""`hetero-pp export`: write a run's model as a folder that other programs can load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hetero_pp.config.folder import RunFolder, recorded_run
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_trained
from hetero_pp.core.errors import ConfigError, DamagedFile
from hetero_pp.hugging_face.writing import DTypeName, Parameters, write_model
from hetero_pp.program.report.output import announce
from replica_groups.exchange.log import open_log
from replica_groups.exchange.replay import checkpoint_after


def export(runs: Path, run: str, to: Path, dtype: DTypeName, round_: int | None) -> None:
    """Write the model of a run after a round into a new or empty folder.

    `round_`: None means the newest run checkpoint. Raises ConfigError if the run or the round does not exist, or if the
    folder has files.
    """
    folder = recorded_run(runs, run)
    spec = read_trained(folder)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError((), f"--to {to}: found files in this folder, expected a new or empty folder")
    with theta_after(spec, folder, round_) as (number, parameters):
        try:
            to.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError((), f"--to {to}: cannot be created ({error.strerror})") from None
        try:
            config = spec.config
            size = write_model(
                to, parameters, spec.parameter_shapes, spec.shape, config.data, dtype, config.model.weights
            )
        except OSError:
            for path in to.iterdir():  # the folder was empty before: empty it again, so that a retry can use it
                path.unlink()
            raise
    announce(f"{to}: {spec.config.name} after round {number}, {size / 1e6:.1f} MB of {dtype}")


@contextmanager
def theta_after(spec: RunSpec, run: RunFolder, round_: int | None) -> Iterator[tuple[int, Parameters]]:
    """Yield the round and a function that returns each parameter by its name.

    The parameters come from the run checkpoint of that round, or are replayed from an earlier one.
    `round_`: None means the newest run checkpoint.
    """
    log = open_log(spec.config, run)
    found = log.checkpoints()
    if not found:
        raise ConfigError(
            (), f"{log.store.url()}: found no run checkpoint, expected at least the first run checkpoint of the run"
        )
    wanted = max(found) if round_ is None else round_
    if wanted in found:
        with log.open_checkpoint(wanted) as file:
            for name, shape in spec.parameter_shapes.items():
                if file.shapes.get(name) != shape:
                    own = "nothing" if name not in file.shapes else f"the shape {list(file.shapes[name])}"
                    told = f"{name}: found {own}, expected {list(shape)}"
                    raise DamagedFile(f"the run checkpoint does not fit its config.yaml: {told}")
            yield wanted, file.tensor
        return
    damaged = list[str]()  # theta is replayed from an earlier run checkpoint
    try:
        checkpoint = checkpoint_after(log, spec.run, wanted, partial(round_optimizer, spec), damaged)
    except FileNotFoundError as error:
        raise ConfigError((), f"--round {wanted}: {'; '.join(damaged or [str(error)])}") from None
    yield wanted, checkpoint.parameters.__getitem__
