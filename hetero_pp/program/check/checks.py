"""Checks of the way to the exchange: proxies, answer, clock, neighbours, line, and what admits this host."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from urllib.request import getproxies_environment

import torch

from hetero_pp.config.lines import WAYS, Way, stage_link_name
from hetero_pp.config.member_inputs import devices_of, in_words
from hetero_pp.config.shared import require_data
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.device import accelerators, name_of
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, Refused
from hetero_pp.core.proxies import grpc_proxy, route_to
from hetero_pp.core.units import format_bytes, format_count, format_duration, format_names, format_seconds
from hetero_pp.data.corpora import corpus_bytes, documents
from hetero_pp.data.tokens import is_encoded, prepare_tokens
from hetero_pp.program.check.findings import (
    Finding,
    FindingState,
    NotChecked,
    fail,
    in_background,
    ok,
    warn,
)
from hetero_pp.program.check.subject import CheckedPart, Subject
from hetero_pp.program.join.membership import read_run_on_disk, unanswered
from hetero_pp.program.launch.earlier import find_unfinished, held_parts
from hetero_pp.program.launch.hosts import fixed_addresses, meeting_places
from hetero_pp.program.launch.job import require_open_files
from hetero_pp.program.launch.this_machine import LONG_STEP, limits_of
from hetero_pp.program.rehearse import shown_rates, too_slow
from hetero_pp.rpc.admission_client import Rate, measure
from hetero_pp.rpc.identities import CLOCKS_DIFFER
from hetero_pp.simulator.memory import disk_use
from hetero_pp.simulator.traffic import stage_link_loads
from hetero_pp.store.lease import require_conditional_writes
from hetero_pp.store.opening import folder_of

_PUBLIC = "192.0.2.1"  # a host outside of all private networks (RFC 5737); it is not dialled
CLOCK_WARNING_SECONDS = 60.0  # difference of clocks from which logs and expiry dates mislead

_SECONDS_TO_DIAL = 1.5
_NODES_OF = "the nodes of "
_MOST_DIALLED = 16  # Neighbours that are dialled, each in a thread. A group rarely has more stages.
SHOWN = 4  # most names in a line
SOON_SECONDS = 3600.0  # remaining validity of a ticket or certificate from which a host should hurry


def check_proxy(subject: Subject) -> Finding:
    """Say which proxy connections use. A proxy that does not work is a warning, because connections go without it."""
    if not getproxies_environment():
        return ok("the environment names no proxy")
    if subject.peer is None:
        proxy = grpc_proxy(_PUBLIC)
        return ok("no proxy for gRPC" if proxy is None else f"{proxy} outside of private networks")
    route = route_to(subject.peer.address)
    if route.proxy is not None:
        return ok(f"the exchange is reached through {route.proxy}")
    if route.note:
        return warn(f"the exchange is{route.note}: correct the variable, or name the exchange in no_proxy")
    return ok("the environment names a proxy, which is not used for the exchange")


def check_exchange(subject: Subject) -> Finding:
    """Check that the exchange answers and admits this host. Nothing changes there. Raises Refused with its reason."""
    if subject.peer is None or subject.answer_ is None:
        if subject.kind == "run" and (resume := read_run_on_disk(subject.folder).resume):
            return warn(f"the exchange of {subject.name} does not run now; resume it with: {resume}")
        raise NotChecked("needs a ticket, or a run whose exchange runs now")
    address = subject.peer.address
    try:
        subject.answer_.result()
    except LinkTimeout as error:
        here = f"{error}: see its log in {subject.folder.path}/logs"
        return fail(here if subject.peer.serves else unanswered(error, subject.name))
    return ok(f"{address} answers and admits this host, with the same version of the protocol")


def check_clock(subject: Subject) -> Finding:
    """Compare this host's clock with that of the exchange, to within the seconds that the call took."""
    return clock_verdict(subject.answer.ahead, subject.answer.within)


def clock_verdict(ahead: float, within: float) -> Finding:
    """Return the finding for an exchange clock `ahead` seconds before this host's, give or take `within`."""
    apart = max(abs(ahead) - within, 0.0)
    if apart < CLOCK_WARNING_SECONDS:
        return ok(f"differs by less than {format_duration(max(apart, 1.0))} from the clock of the exchange")
    told = f"this host's clock is {format_duration(apart)} {'behind' if ahead > 0 else 'ahead of'} the exchange's"
    mend = "set it by network time (timedatectl set-ntp true)"
    if apart > CLOCKS_DIFFER:
        return fail(f"{told}, so certificates seem not valid yet or expired: {mend}")
    return warn(f"{told}: {mend}")


def check_neighbours(subject: Subject) -> Finding:
    """Dial the neighbouring stages that listen. Those that are not reached are reached through the exchange."""
    if subject.peer is not None:
        told = subject.answer.reply.neighbours  # of names that the run does not have, nothing is dialled
        found = {name: told[name] for name in subject.part.spec.members if name in told}
    else:
        part = subject.part
        found = {one.name: one.address for one in fixed_addresses(part.spec.config) if not one.is_of_this_host}
        places = [one for one in meeting_places(part.spec.config) if one.member in part.names]
        found |= {f"{_NODES_OF}{one.name}": one.address for one in places if not one.is_of_this_host}
        if not found:
            raise NotChecked("the YAML names no address on another host")
    if not found and not _starts_stage(subject.part):
        return ok("no stage starts here, so there are no neighbours")
    if not found:
        return ok("no neighbouring stage listens now; stages send to each other through the exchange")
    found = dict(islice(found.items(), _MOST_DIALLED))
    dialled = {name: in_background(partial(_answers, address)) for name, address in found.items()}
    silent = {name: found[name] for name, answers in dialled.items() if not answers.result()}
    if silent:
        shown = format_names([f"{name} at {address}" for name, address in silent.items()], SHOWN)
        relays = any(not name.startswith(_NODES_OF) for name in silent)
        why = f"it is not started, or a firewall is between{'; the exchange relays instead' if relays else ''}"
        return warn(f"{shown} cannot be dialled: {why}")
    return ok(f"dialled {format_names(list(found), SHOWN)}")


def check_relay(subject: Subject) -> Finding:
    """Dial the port of the relay. A stage needs it unless it reaches its neighbours directly."""
    if subject.peer is None:
        raise NotChecked("needs a ticket, or a run whose exchange runs now")
    port, part = subject.answer.reply.relay_port, subject.part
    if not port:
        raise NotChecked("the exchange has no relay")
    if not _starts_stage(part):
        raise NotChecked("no stage starts here")
    address = f"{subject.peer.address.rpartition(':')[0]}:{port}"
    if _answers(address):
        return ok(f"{address} answers")
    mend = f"on the exchange's host, open this port in the firewall and forward it as {port}"
    return fail(f"{address} does not answer, so stages that cannot dial each other have no link: {mend}")


def _starts_stage(part: CheckedPart) -> bool:
    members = part.spec.members
    return any(members[name].stage is not None for name in part.names if name in members)


def _answers(address: str) -> bool:
    try:
        with route_to(address).connect(address, _SECONDS_TO_DIAL):
            return True
    except (OSError, ValueError, OverflowError):  # it cannot be reached, or is no address
        return False


def check_line(subject: Subject) -> Finding:
    """Measure this host's line to the exchange for a second or two, with 4 MiB in each direction at most."""
    if subject.peer is None:
        raise NotChecked("needs a ticket, or a run whose exchange answers")
    if subject.peer.serves:
        raise NotChecked("the exchange is on this host")
    part, _ = subject.part, subject.answer
    try:
        up, down = measure(subject.peer.address, subject.peer.identity)
    except Refused as error:  # such as one measurement too many: the line may be as it should be
        return warn(f"not measured: {error}")
    return line_verdict(part.spec, part.names[0], {"up": up, "down": down})


def line_verdict(spec: RunSpec, member: str, measured: Mapping[Way, Rate]) -> Finding:
    """Return the finding for the measured rates of a member's line."""
    shown = shown_rates(measured)
    if slow := too_slow(spec, member, measured):
        mend = "stop other traffic, use a cable, or tell the operator of the run the measured rates"
        return warn(f"{shown}; the run's YAML expects {slow} of {member}: {mend}")
    loads = step_bytes(spec, member)
    if not any(loads.values()):
        return ok(shown)
    seconds = max(8 * loads[way] / max(measured[way].bits_per_second, 1.0) for way in WAYS)
    step = ", ".join(f"{format_bytes(loads[way])} {way}" for way in WAYS)
    told = f"{shown}; a step of {member} needs {step}, at least {format_seconds(seconds)} at this rate"
    if seconds > LONG_STEP:
        return warn(f"{told}: ask for a run with a smaller boundary, or use a faster line")
    return ok(told)


def step_bytes(spec: RunSpec, member: str) -> dict[Way, int]:
    """Return the bytes that a member sends to and receives from neighbouring stages in an inner step."""
    own, found = spec.members[member], dict.fromkeys(WAYS, 0)
    if own.stage is None or not isinstance(own.replica, ParticipantsReplica):
        return found
    loads = stage_link_loads(spec, own.replica)
    for hop in (own.stage.index - 1, own.stage.index):
        link = spec.links.get(stage_link_name(own.replica.name, hop))
        if link is not None:
            is_source = link.source == member
            found["up"] += loads["forward" if is_source else "backward"].step
            found["down"] += loads["backward" if is_source else "forward"].step
    return found


def check_certificate(subject: Subject) -> Finding:
    """Check that what admits this host is valid for a while. `join` renews a certificate while it runs."""
    if subject.until is None:
        raise NotChecked("this host holds no ticket or certificate of the run")
    what, until = subject.until
    left = until - time.time()
    if left <= 0:
        mend = "ask for another (or is the clock of this host wrong?)"
        return fail(f"{what} expired {format_duration(-left)} ago: {mend}")
    told = f"{what} is valid for {format_duration(left)}"
    return ok(told) if left > SOON_SECONDS else warn(f"{told}: start `join` before, or ask for another ticket")


# Checks of this machine: its GPU, memory, disk, files, ports and text, for the part of a run that starts here.


LEAST_BYTES = 1e9  # free bytes below which a disk counts as full if it is not known what the run writes
MOST_ENCODED_BYTES = 64e6  # bytes of text that are encoded to compare it: a few seconds
_TOKEN_BYTES = 2  # Bytes on disk for each byte of text: a token of one byte takes two. Other tokenizers need less.
_LEFT = 0.1  # share of the free space that should be left
_NVIDIA = Path("/proc/driver/nvidia/version")
_CUDA_BUILD = "pip install --force-reinstall torch (docs/tutorial_home.md)"


def checks_of(subject: Subject) -> dict[str, Callable[[], Finding]]:
    """Return all checks by name, in the order in which they are printed."""
    of_subject = {
        "settings": check_settings,
        "memory": check_memory,
        "disk": check_disk,
        "store": check_store,
        "open files": check_open_files,
        "text": check_text,
        "ports": check_ports,
        "leftovers": check_leftovers,
        "proxy": check_proxy,
        "exchange": check_exchange,
        "clock": check_clock,
        "neighbours": check_neighbours,
        "relay": check_relay,
        "line": check_line,
        "certificate": check_certificate,
    }

    def checked(check: Callable[[Subject], Finding]) -> Finding:
        """Make a check. A YAML may be for larger machines, so what is too small here is a warning."""
        if subject.kind != "yaml" or check not in (check_memory, check_disk, check_open_files):
            return check(subject)
        try:
            found = check(subject)
        except (HeteroPPError, OSError) as error:
            return warn(str(error))
        return warn(found.line) if found.state is FindingState.FAIL else found

    return {"gpu": check_gpu, **{name: partial(checked, check) for name, check in of_subject.items()}}


# ---- the machine ----


def check_gpu() -> Finding:
    """Compare the driver of the GPU with PyTorch's build."""
    version = torch.version
    built_for = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else ""
    has_driver = _NVIDIA.is_file() or shutil.which("nvidia-smi") is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = tuple(map(name_of, accelerators()))
        if has_driver and built_for and not names:
            torch.cuda.is_available()  # warns of a driver that is too old
    return gpu_verdict(built_for, has_driver, names, " ".join(str(told[0].message).split()) if told else "")


def gpu_verdict(built_for: str, has_driver: bool, names: Sequence[str], trouble: str = "") -> Finding:
    """Return the finding for the GPU of this machine, and for PyTorch's build.

    `built_for`: `CUDA 13.0`, `ROCm 6.4`, or empty for a build that uses neither. `has_driver`: whether a driver of
    NVIDIA is installed. `names`: accelerators that PyTorch can use. `trouble`: its warning when it looked for them.
    """
    build = f"torch {torch.__version__}"
    if names:
        return ok(f"{', '.join(names)}; {build}, built for {built_for or 'this machine'}")
    if not has_driver:
        return ok("found no GPU, so members compute on the CPU")
    if not built_for:
        return warn(f"found an NVIDIA driver, but {build} is a build without CUDA, so the CPU computes: {_CUDA_BUILD}")
    why = trouble or "no GPU is visible to this process (CUDA_VISIBLE_DEVICES, or rights to /dev/nvidia*)"
    return warn(f"{build} for {built_for} finds no usable GPU, so the CPU computes: {why}; update the driver")


# ---- what starts here ----


def check_settings(subject: Subject) -> Finding:
    """Check the settings as `launch` does. Raises their errors."""
    if subject.problem:
        return fail(subject.problem)
    if subject.part_ is None:
        raise NotChecked("no YAML, ticket or run was given")
    if subject.kind == "ticket" and (refusal := subject.answer.reply.refusal):
        return warn(refusal) if subject.answer.reply.slots else fail(refusal)
    part = subject.part_.result()
    if subject.kind == "ticket":
        return ok(f"{subject.told}: open now: {format_names([slot for (slot,) in part.choices], SHOWN)}")
    return ok(f"{subject.told}, starts {format_names(part.names, SHOWN)} here")


def check_memory(subject: Subject) -> Finding:
    """Check devices and memory as `launch` does, for each slot that a ticket may take."""
    part = subject.part
    if part.spec.config.rehearsal is not None:
        raise NotChecked("a rehearsal computes nothing")
    limits = {tuple(names): limits_of(part.spec, names) for names in part.choices}
    final = {names: found for names, found in limits.items() if any(one.is_final for one in found)}
    if final:
        names, found = next(iter(final.items()))
        why = "; ".join(str(part.located(ConfigError(one.key, one.message))) for one in found)
        if len(final) == len(limits):
            return fail(why)
        rest = [one for (one,) in limits if (one,) not in final]
        return warn(f"this machine can take {format_names(rest, SHOWN)}, but not {', '.join(names)}: {why}")
    if told := list(dict.fromkeys(one.message for found in limits.values() for one in found)):
        return warn("; ".join(told))
    devices = {name: name_of(one) for name, one in devices_of(part.spec, part.names).items()}
    return ok(f"enough memory; {in_words(devices) or 'no member here'}")


def check_disk(subject: Subject) -> Finding:
    """Compare what the run writes to its folder with the free space there."""
    path = subject.runs.absolute()
    folder, mend = next(one for one in (path, *path.parents) if one.exists()), "choose another folder with --runs"
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return fail(f"{folder}: cannot be written ({error.strerror}): {mend}")
    free = shutil.disk_usage(folder).free
    try:
        needed = needed_bytes(subject.part)
    except NotChecked:
        told = f"{format_bytes(free)} are free at {folder}"
        little = f"{told}, which is little for a run: free space, or {mend}"
        return ok(told) if free >= LEAST_BYTES else warn(little)
    shown = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in needed.items() if size >= 1)
    total = sum(needed.values())
    told = f"the run writes about {format_bytes(total)} ({shown}) of the {format_bytes(free)} free at {folder}"
    if total > free:
        return fail(f"{told}: free space, or {mend}")
    return ok(told) if total <= (1 - _LEFT) * free else warn(f"{told}, which is nearly all: free space, or {mend}")


def check_store(subject: Subject) -> Finding:
    """Write to the store of the run log, and see that it creates an object once."""
    settings = subject.part.spec.config.store
    if settings.url is None or folder_of(settings.url) is not None:
        raise NotChecked("the run log is in a folder")
    if subject.kind not in ("yaml", "run"):
        raise NotChecked("only the host of the exchange has credentials of the store")
    store = settings.open(subject.name, subject.folder.log)
    require_conditional_writes(store)
    return ok(f"{store.url()} can be written, and creates an object once")


def needed_bytes(part: CheckedPart) -> dict[str, float]:
    """Return the bytes that the part writes, by purpose. If there are several slots, the largest counts."""
    uses = [disk_use(part.spec, names) for names in part.choices]
    every = [{purpose: use.n_bytes for purpose, use in one.items()} for one in uses]
    needed = max(every, key=lambda one: sum(one.values()))
    settings, text = part.spec.config.data, 0
    members = [part.spec.members[name] for name in part.names if name in part.spec.members]
    if settings.streamed is None and any(member.reads_data for member in members):
        try:
            text = corpus_bytes(settings)
        except (ConfigError, OSError):
            text = 0  # the check of the text says so
    return needed | {"encoded text": _TOKEN_BYTES * text}


def check_open_files(subject: Subject) -> Finding:
    """Check that the launcher may open enough files. Raises ConfigError as `launch` does."""
    processes = 1 if subject.part_ is None else len(subject.part.names)
    require_open_files(processes)
    return ok(f"enough for {format_count(processes, 'process', 'processes')}")


def check_text(subject: Subject) -> Finding:
    """Read a document, and compare the digest of the tokens with the run's if both are known. Writes no file."""
    part = subject.part
    config, members = part.spec.config, part.spec.members
    readers = [name for names in part.choices for name in names if name in members and members[name].reads_data]
    if not readers:
        raise NotChecked("no member that starts here reads the text")
    if subject.prepared is not None:
        raise NotChecked("the text was read before the checks")
    data, cache = config.data, subject.folder.cache
    if subject.kind == "ticket":
        try:
            require_data(config, readers[0], subject.data)
        except ConfigError as error:
            return fail(error.message) if len(readers) == len(part.choices) else warn(error.message)
    if data.streamed is not None and find_spec("datasets") is None:
        return fail(f"{data.corpus} is streamed, which needs a package: pip install 'hetero-pp[datasets]'")
    if data.streamed is not None:
        return warn(f"{data.corpus} is streamed and was not opened here")
    try:
        next(documents(data))
    except ConfigError as error:
        return fail(str(part.located(error)))
    size = corpus_bytes(data)
    told = f"{data.corpus} can be read ({format_bytes(size)})"
    expected = str(subject.answer.reply.tokens) if subject.answer_ is not None else ""
    if not expected:
        return ok(told)
    if not part.has_tokenizer:
        return ok(f"{told}; not compared with the run's, whose tokenizer comes with `join`")
    if not is_encoded(data, cache) and size > MOST_ENCODED_BYTES:
        return ok(f"{told}; too large to be compared here; `join` compares it with the run's")
    with tempfile.TemporaryDirectory() as scratch:
        found = prepare_tokens(data, cache if is_encoded(data, cache) else Path(scratch)).digest
    if found == expected:
        return ok(f"{told}, and is the same as the run's")
    differ = f"the sha256 of its tokens begins with {found[:12]}, the run's with {expected[:12]}"
    return fail(f"{told}, but is another text than the run's: {differ}; give the run's text with --data PATH")


def check_ports(subject: Subject) -> Finding:
    """Try to listen at each fixed address, as `launch` does."""
    part = subject.part
    running = held_parts(subject.runs.absolute(), subject.name) if subject.kind == "run" else []
    listening = [one for one in fixed_addresses(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in listening:
        if one.member in running:
            continue
        try:
            one.try_to_listen()
        except ConfigError as error:
            return fail(str(part.located(error)))
    places = [one for one in meeting_places(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in places:
        try:
            one.try_to_listen()
        except ConfigError as error:
            return warn(f"{part.located(error)}; if this is another node of {one.member}, all is well")
    listening += places
    if not listening:
        return ok("no fixed port on this host; free ones are chosen")
    shown = [f"{one.address} ({'used by this run' if one.member in running else 'free'})" for one in listening]
    return ok(", ".join(shown))


def check_leftovers(subject: Subject) -> Finding:
    """Look for another launch of the run, and for an unfinished run."""
    if not subject.name:
        raise NotChecked("needs a YAML, a ticket or a run")
    runs, folder = subject.runs.absolute(), subject.folder.path
    held = held_parts(runs, subject.name)
    if held:
        told = f"{folder}: a launch on this host runs {format_names(held, SHOWN)}"
        if subject.kind == "yaml":
            return fail(f"{told}; wait until it has ended, or give this run another `name`")
        return ok(told)
    found = find_unfinished(subject.part.spec.config, subject.runs) if subject.kind == "yaml" else None
    if found is not None:
        return warn(f"{found}; `launch --resume` continues it, and `launch --new` moves it aside")
    return ok(f"no other launch uses {folder}")
