"""Program of one rank of test_contract.py.

It resumes from what another number of ranks saved, and writes its losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from rank import build, tokens_of

from replica_groups.outer.ranks import init_ranks


def main(saved: Path, told: Path) -> None:
    torch.set_num_threads(1)
    ranks = init_ranks(torch.device("cpu"))
    engine = build("torchtitan", {}, ranks)
    engine.load(saved)
    losses = [engine.inner_step(tokens_of(step), step) for step in range(3, 5)]
    if ranks.is_first:
        told.write_text(json.dumps(losses))
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
