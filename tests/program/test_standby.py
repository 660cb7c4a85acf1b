"""Two hosts may serve the exchange of one run: the run goes on if one dies, freezes or loses the store, and has the
bits of a run without that.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts_with_standby import MEMBERS, HostsWithStandby

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fault_injection.dying_host import PHASES

ROUNDS = 5
DIES_IN = 3


@pytest.fixture
def made() -> Iterator[list[HostsWithStandby]]:
    found: list[HostsWithStandby] = []
    yield found
    for one in found:
        one.kill()


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the hashes of the same run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    run = HostsWithStandby(folder, corpus, ROUNDS, str(folder / "store"))
    try:
        run.start("exchange")
        for part in MEMBERS:
            run.start(part)
        assert run.wait("exchange")[0] == 0, run.printed("exchange")
        found: dict[str, str] = run.summary()["parameters_sha256"]
        return found
    finally:
        run.kill()


@pytest.mark.starts_processes
@pytest.mark.parametrize("phase", PHASES)
def test_a_host_that_dies_in_any_phase_is_followed(
    phase: str, corpus: Path, tmp_path: Path, made: list[HostsWithStandby], expected: dict[str, str]
) -> None:
    run = HostsWithStandby(tmp_path, corpus, ROUNDS, str(tmp_path / "store"))
    made.append(run)
    run.serve("exchange", dies=(phase, DIES_IN, "KILL"))
    run.start("standby")
    for part in MEMBERS:
        run.start(part)
    assert run.wait("exchange")[0] == -signal.SIGKILL, run.printed("exchange")
    assert run.wait("standby")[0] == 0, run.printed("standby")
    for part in MEMBERS:
        assert run.wait(part)[0] == 0, run.printed(part)
    summary = run.summary("standby")
    assert summary["parameters_sha256"] == expected
    assert summary["rounds"] == ROUNDS
