"""`hetero-pp plan`: search, explain, and write a YAML that `launch` accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.config.alike import range_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_json, write_whole
from hetero_pp.core.units import format_bytes, format_count, parse_fraction
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.program.rehearse import MeasuredInput
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.program.simulate import print_assumption, print_exchange, print_waiting
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.planner.search import AIM, Choice, Result, describe_penalty, search_all

MOST_EXPLAINED = 8  # most entries of the explanation that are shown
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+|/[1-9]\d*)?")  # a number or a ratio


def plan(
    path: Path,
    overrides: Sequence[str],
    target: str | None,
    json_path: Path | None,
    write: Path | None,
    measured: Path | None = None,
) -> None:
    """Plan the YAML for a utilization, print why, and write the plan. Raises ConfigError if it cannot be reached.

    `measured`: what a rehearsal measured, which replaces lines and costs of the YAML.
    """
    share = None
    if target is not None:
        try:
            share = parse_fraction(target)
        except ValueError as error:
            raise ConfigError((), f"--target-utilization: {error}") from None
        if not 0 < share < 1:
            raise ConfigError((), f"--target-utilization: found `{target}`, expected more than 0 and less than 1")
    write = write or Path(f"{path.stem}.plan.yaml")
    if write.exists() and write.samefile(path):
        raise ConfigError((), f"--write {write}: found the input file, expected another file")
    file = ConfigFile(path, overrides)
    config = file.config.with_absolute_paths()
    console = standard_output()
    try:
        vocabulary = None if config.model.vocabulary is not None else load_tokenizer(config.data).vocabulary
        layers = config.model.resolve(vocabulary).layers
    except ConfigError as error:
        raise file.located(error) from None
    if measured is not None:
        found = MeasuredInput(measured)
        config = found.applied(config, layers)
        say(console, found.told())
    try:
        with console.status("searching"):
            result = search_all(config, vocabulary, share)
    except ConfigError as error:
        raise file.located(error) from None
    lines = list(_lines(path, share, result))
    say(console, lines[0], bold=lines[0])
    for line in lines[1:]:
        say(console, line)
    explained, hidden = _explained(result.choices, result.slowest)
    for what, choices in explained:
        say(console, what, bold=what)
        for chosen, why in choices:
            say(console, chosen, indent="  ")
            say(console, why, style="dim", indent="    ")
    if hidden:
        say(console, f"{hidden:,} more are not shown; `--json FILE` has every choice.")
    if result.rows:
        _print_rows(console, result)
    print_waiting(console, result.waits)
    print_exchange(console, result.prediction.exchange)
    print_assumption(console, assumed_in(RunSpec(result.config, vocabulary)))
    write_json(json_path, _as_json(share, result, write))
    if not result.reached:
        best = f"the best plan reaches {result.utilization:.1%}, limited by {result.limit}; nothing was written"
        wanted = AIM if share is None else share
        raise ConfigError((), f"{path}: a utilization of {wanted:.1%} cannot be reached: {best}")
    try:
        result.config.check()
    except ConfigError as error:
        grouped = f"{error.message} (the plan has {format_count(len(result.config.replicas), 'replica')})"
        raise file.located(ConfigError(error.key, grouped)) from None
    reasons = (f"{what}: {chosen}: {why}" for what, own in explained for chosen, why in own)
    write_whole(write, file.with_config(result.config, [*lines, *reasons]).encode())
    say(console, f"Written to {write}.")


def _lines(path: Path, target: float | None, result: Result) -> Sequence[str]:
    absolute, tokens = result.prediction.utilization["absolute"], result.prediction.tokens_per_second
    before = "" if result.before is None else f", from {result.before:.1%} before planning"
    if result.before is None and not result.groups:
        before = "; the YAML could not run before planning"
    requested = f"aim: {AIM:.1%}" if target is None else f"requested: {target:.1%}"
    lines = [
        f"{path}: {result.utilization:.1%} of the tokens per second with free links{before} ({requested}).",
        f"Members train {absolute:.1%} of the time: {tokens:,.0f} tokens per second.",
    ]
    if result.penalty is not None:
        share = f"{result.compressed_share:.0%} of the replicas compress"
        lines.append(f"Expected at most: {describe_penalty(result.penalty)}, as {share}.")
    return [*lines, result.wanted] if result.wanted else lines


def _print_rows(console: Console, result: Result) -> None:
    """Print the boundaries to choose from, with what each gives and costs."""
    table = PlainTable(["rank"], ["bytes a token", "tokens/s", "utilization", "loss, Het-PP", "loss, here", "chosen"])
    for row in result.rows:
        losses = [row.penalty.paper, row.penalty.measured]
        shown = ["–" if loss is None else f"+{loss:.1%}" for loss in losses]
        chosen = range_of(list(row.chosen_by)) if row.chosen_by else ""
        rate = f"{row.tokens_per_second:,.0f}"
        table.add_row(
            str(row.rung).removeprefix("rank "),
            format_bytes(row.bytes_per_token),
            rate,
            f"{row.utilization:.1%}",
            *shown,
            chosen,
        )
    console.print(table)
    say(
        console,
        "each row: this boundary for all groups. Loss: expected rise over no compression, from Het-PP Table 2 (512M "
        "parameters) and from our tables (0.34M; –: not measured)",
        style="dim",
        indent="  ",
    )


Explained = tuple[str, list[tuple[str, str]]]
"""Name of the replica or section that was chosen for, and pairs of a choice and its reason."""


def _explained(choices: Sequence[Choice], slowest: str) -> tuple[list[Explained], int]:
    """Group choices by what they are for. Return what to show, and how many entries are hidden.

    If there are more than MOST_EXPLAINED entries, those whose texts differ only in numbers become one entry with
    ranges. If still more are left, the first ones and the entry with `slowest` are shown.
    """
    found: list[Explained] = [
        (what, [(one.chosen, one.why) for one in own]) for what, own in groupby(choices, key=lambda one: one.what)
    ]
    if len(found) <= MOST_EXPLAINED:
        return found, 0
    alike: dict[str, list[Explained]] = {}
    for entry in found:
        alike.setdefault(_NUMBER.sub("#", json.dumps(_renamed(entry))), []).append(entry)
    kinds = list(alike.values())
    worst = [kind for kind in kinds[MOST_EXPLAINED - 1 :] if any(what == slowest for what, _ in kind)]
    shown = [*kinds[: MOST_EXPLAINED - 1], *(worst or kinds[MOST_EXPLAINED - 1 : MOST_EXPLAINED])]
    return [_folded(kind) for kind in shown], len(found) - sum(map(len, shown))


def _renamed(entry: Explained) -> list[str]:
    """Return the texts of an entry, with the replica's own name as `home-*`: names of its members contain it."""
    name = entry[0].split(" ")[0]
    pattern = re.compile(rf"(?<![\w-]){re.escape(name)}(?=\.|\b)")
    common = re.sub(r"\d+", "*", name)
    return [pattern.sub(lambda _: common, text) for pair in entry[1] for text in pair]


def _folded(kind: Sequence[Explained]) -> Explained:
    """Return one entry for entries whose texts differ only in numbers: `20..98 Mbit/s`."""
    if len(kind) == 1:
        return kind[0]
    texts = [_with_ranges(same) for same in zip(*map(_renamed, kind), strict=True)]
    what = f"{range_of([what for what, _ in kind])} ({len(kind)} that differ only in numbers)"
    return what, list(zip(texts[::2], texts[1::2], strict=True))


def _with_ranges(texts: Sequence[str]) -> str:
    """Merge texts with the same words into one, in which numbers that differ are ranges."""
    words, ranges = _NUMBER.split(texts[0]), list[str]()
    for same in zip(*(_NUMBER.findall(text) for text in texts), strict=True):
        ordered = sorted(set(same), key=lambda number: Fraction(number.replace(",", "")))
        ranges.append(ordered[0] if len(ordered) == 1 else f"{ordered[0]}..{ordered[-1]}")
    return "".join(part for pair in zip_longest(words, ranges, fillvalue="") for part in pair)


def _as_json(target: float | None, result: Result, write: Path) -> dict[str, Any]:
    rows = [
        {"boundary": str(row.rung), "loss": asdict(row.penalty), "chosen_by": list(row.chosen_by)}
        | {key: getattr(row, key) for key in ("bytes_per_token", "tokens_per_second", "utilization")}
        for row in result.rows
    ]
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
        "boundaries": rows,
        "waiting": None if result.waits is None else asdict(result.waits),
        "choices": [asdict(choice) for choice in result.choices],
        "written": str(write) if result.reached else None,
        "config": result.config.model_dump(mode="json"),
    }
