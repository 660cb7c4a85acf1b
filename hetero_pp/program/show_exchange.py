"""Prints the bytes, memory and CPU time that the exchange needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console

from hetero_pp.core.units import format_bits_per_second, format_bytes, format_count, format_duration, format_seconds
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.simulator.exchange_load import (
    CALL_SECONDS,
    POSITION_SECONDS,
    RELAY_SECONDS_A_GIGABYTE,
    TRANSFER_SECONDS_A_GIGABYTE,
    VALUE_SECONDS,
    ExchangeLoad,
)
from hetero_pp.simulator.traffic import RINGS

ASSUMED_LINE = 1e9
"""Bits per second that the table assumes for an exchange without a line."""


def print_exchange(console: Console, load: ExchangeLoad) -> None:
    """Print the bytes that cross the exchange's line in a round, their transfer time, memory and CPU time."""
    console.print(_table(load))
    for sentence in (_way(load), _joining(load), _needs(load)):
        if sentence:
            say(console, sentence, style="dim")
    if not load.is_limited and load.way not in RINGS:
        say(console, _warning(load), bold="exchange:")


def _table(load: ExchangeLoad) -> PlainTable:
    table = PlainTable(["exchange, a round"], ["receives", "sends"], ["line"])
    carried = load.contributions
    table.add_row("contributions", format_bytes(carried.received), format_bytes(carried.sent))
    if load.relayed_links:
        name = format_count(load.relayed_links, "relayed stage link")
        relayed = load.relayed
        both = None if relayed is None else (format_bytes(relayed.received), format_bytes(relayed.sent))
        table.add_row(name, *(both or ("?", "?")))
    limits = load.received_bits_a_second, load.sent_bits_a_second
    if load.is_limited:
        down, up = map(format_bits_per_second, limits)
        name = f"{load.line or 'simulate.exchange_bandwidth'}: {down} down, {up} up"
    else:
        given = "none given" if load.line is None else f"{load.line}: unlimited"
        limits, name = (ASSUMED_LINE, ASSUMED_LINE), f"{given}; shown: {format_bits_per_second(ASSUMED_LINE)}"
    took = load.seconds(*limits)
    table.add_row("takes, at its line", format_duration(took.received), format_duration(took.sent), name)
    return table


def _way(load: ExchangeLoad) -> str:
    if load.way in RINGS:
        return f"Contributions go from replica to replica (simulate.exchange: {load.way}), not through the exchange."
    if load.way == "store":
        return (
            "Contributions go through store.url: members upload and download them there. The exchange "
            "reads each one twice, to check it and to audit the round."
        )
    if load.relayed_links:
        return (
            "Stage links are relayed if neither stage has an address (listen) that the other can dial. "
            "Times of steps do not include the relay."
        )
    return ""


def _joining(load: ExchangeLoad) -> str:
    largest, first = format_bytes(load.largest_checkpoint_bytes), format_bytes(load.first_checkpoint_bytes)
    at_start = f"{first} to all members at the start of the run"
    return f"It also sends run checkpoints: up to {largest} to each member that joins, and {at_start}."


def _needs(load: ExchangeLoad) -> str:
    memory, cpu = load.memory_bytes, load.cpu_seconds
    bytes_ = f"{TRANSFER_SECONDS_A_GIGABYTE:g} s per GB of TLS, {RELAY_SECONDS_A_GIGABYTE:g} s per GB relayed"
    values = f"{1e9 * VALUE_SECONDS:g} ns per decoded value and {1e9 * POSITION_SECONDS:g} ns for its position"
    costs = f"{bytes_}, {format_seconds(CALL_SECONDS)} per call, {values} (benchmarks/exchange_load.py)"
    holds = f"{format_bytes(sum(memory.values()))} of memory ({_parts(memory, format_bytes)})"
    takes = f"{format_duration(sum(cpu.values()))} of CPU time per round ({_parts(cpu, format_duration)})"
    return f"Its process needs about {holds} and {takes}. Assumed CPU time: {costs}."


def _parts(found: Mapping[str, float], shown: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {shown(size)}" for name, size in found.items() if size)


def _warning(load: ExchangeLoad) -> str:
    carried = load.carried
    took = load.seconds(ASSUMED_LINE, ASSUMED_LINE)
    sends = carried.sent >= carried.received
    what = f"sends {format_bytes(carried.sent)}" if sends else f"receives {format_bytes(carried.received)}"
    seconds = format_duration(max(took.received, took.sent))
    lacks, remedy = "no line is set", "set exchange.line"
    if load.line is not None:
        lacks, remedy = f"its line `{load.line}` has no bandwidth", f"set lines.{load.line}.bandwidth"
    slow = f"at {format_bits_per_second(ASSUMED_LINE)} that takes {seconds}"
    return f"exchange: {lacks}, so its bandwidth is assumed to be unlimited; it {what} per round: {slow}; {remedy}"
