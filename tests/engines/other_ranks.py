"""Program of the only rank of a part of test_contract.py.

It resumes from what two ranks saved, and writes its losses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from rank import build, tokens_of

from replica_groups.engines.ranks import init_ranks

ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Environment of a single rank, as torchrun would set it."""


def main(saved: Path, told: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= ALONE  # the engine needs a group of processes, even of one
    ranks = init_ranks(torch.device("cpu"))
    engine = build("torchtitan", {}, ranks)
    engine.load(saved)
    losses = [engine.inner_step(tokens_of(step), step) for step in range(3, 5)]
    if ranks.is_first:
        told.write_text(json.dumps(losses))
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
