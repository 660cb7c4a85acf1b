"""Shells complete commands, options and files with the scripts that `--show-completion` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """\
eval "$(_HETERO_PP_COMPLETE=source_bash hetero-pp)"
complete -p hetero-pp
COMP_WORDS=(hetero-pp laun) COMP_CWORD=1
_hetero_pp_completion hetero-pp
echo "${COMPREPLY[@]}"
COMP_WORDS=(hetero-pp launch --in-pr) COMP_CWORD=2
_hetero_pp_completion hetero-pp
echo "${COMPREPLY[@]}"
"""


@pytest.mark.starts_processes
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-c", BASH], env=_with_program(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "complete -o default -F _hetero_pp_completion hetero-pp",  # `-o default`: files where there is no other answer
        "launch",
        "--in-process",
    ]


def _with_program(folder: Path) -> dict[str, str]:
    """Return an environment whose path has the program under its name."""
    program = folder / "hetero-pp"
    program.write_text(f"#!{sys.executable}\nfrom hetero_pp.__main__ import main\nmain()\n")
    program.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
