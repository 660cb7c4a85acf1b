"""`hetero-pp plan`: search, explain, and write a YAML that `launch` accepts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.errors import ConfigError
from hetero_pp.files import write_whole
from hetero_pp.planner.search import Result, describe_penalty, search
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.show_exchange import print_exchange
from hetero_pp.program.show_prediction import print_assumption
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile, save_config
from hetero_pp.simulator.machines import assumed_in
from hetero_pp.units import format_count, parse_fraction


def plan(path: Path, overrides: Sequence[str], target: str, json_path: Path | None, write: Path | None) -> None:
    """Plan the YAML for a utilization, print why, and write the plan. Raises ConfigError if it cannot be reached."""
    share = _share(target)
    write = write or Path(f"{path.stem}.plan.yaml")
    if write.exists() and write.samefile(path):
        raise ConfigError((), f"--write {write}: found the input file, expected another file")
    file = ConfigFile(path, overrides)
    config = file.config.with_absolute_paths()
    console = standard_output()
    try:
        vocabulary = None if config.model.vocabulary is not None else load_tokenizer(config.data).vocabulary
        with console.status("searching"):
            result = search(config, vocabulary, share)
    except ConfigError as error:
        raise file.located(error) from None
    lines = list(_lines(path, share, result))
    say(console, lines[0], bold=lines[0])
    for line in lines[1:]:
        say(console, line)
    _print_choices(console, result)
    print_exchange(console, result.prediction.exchange)
    print_assumption(console, assumed_in(RunSpec(result.config, vocabulary)))
    if json_path is not None:
        write_whole(json_path, (json.dumps(_as_json(share, result, write), indent=1) + "\n").encode())
    if not result.reached:
        raise ConfigError(
            (),
            f"{path}: a utilization of {share:.1%} cannot be reached: the best plan reaches "
            f"{result.utilization:.1%}, limited by {result.limit}; nothing was written",
        )
    try:
        result.config.check()
    except ConfigError as error:
        grouped = f"{error.message} (the plan has {format_count(len(result.config.replicas), 'replica')})"
        raise file.located(ConfigError(error.key, grouped)) from None
    reasons = (f"{one.what}: {one.chosen}: {one.why}" for one in result.choices)
    save_config(result.config, write, [*lines, *reasons])
    say(console, f"Written to {write}.")


def _share(target: str) -> float:
    try:
        share = parse_fraction(target)
    except ValueError as error:
        raise ConfigError((), f"--target-utilization: {error}") from None
    if not 0 < share < 1:
        raise ConfigError((), f"--target-utilization: found `{target}`, expected more than 0 and less than 1")
    return share


def _lines(path: Path, target: float, result: Result) -> Sequence[str]:
    absolute, tokens = result.prediction.utilization["absolute"], result.prediction.tokens_per_second
    before = "" if result.before is None else f", from {result.before:.1%} before planning"
    if result.before is None and not result.groups:
        before = "; the YAML could not run before planning"
    lines = [
        f"{path}: {result.utilization:.1%} of the utilization with free links{before} (requested: {target:.1%}).",
        f"Members train {absolute:.1%} of the time: {tokens:,.0f} tokens per second.",
    ]
    if result.penalty is not None:
        share = f"{result.compressed_share:.0%} of the replicas compress"
        lines.append(f"Expected at most: {describe_penalty(result.penalty)}, as {share}.")
    return lines


def _print_choices(console: Console, result: Result) -> None:
    """Print each choice, grouped by what it is for, with its reason below."""
    for what, choices in groupby(result.choices, key=lambda choice: choice.what):
        say(console, what, bold=what)
        for choice in choices:
            say(console, choice.chosen, indent="  ")
            say(console, choice.why, style="dim", indent="    ")


def _as_json(target: float, result: Result, write: Path) -> dict[str, Any]:
    return {
        "target_utilization": target,
        "reached": result.reached,
        "utilization": {
            "relative": result.utilization,
            "absolute": result.prediction.utilization["absolute"],
            "before": result.before,
        },
        "tokens_per_second": result.prediction.tokens_per_second,
        "limit": result.limit,
        "loss": None if result.penalty is None else asdict(result.penalty),
        "compressed_share": result.compressed_share,
        "groups": result.groups,
        "left_out": result.left_out,
        "choices": [asdict(choice) for choice in result.choices],
        "written": str(write) if result.reached else None,
        "config": result.config.model_dump(mode="json"),
    }
