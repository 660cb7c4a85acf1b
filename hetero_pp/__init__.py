"""hetero-pp: pre-train one language model on datacenters and groups of home machines in one run.

Path of the data, and the module of each step:

    tokens                                        hetero_pp.data.batches
      -> stage: embedding and layers              stages.stage, hetero_pp.model.transformer
      -> project onto the subspace                stages.boundary, hetero_pp.pipeline.subspace
      -> link: shaped, counted                    hetero_pp.link.shaping, hetero_pp.link.protocol
           in process, or over gRPC               hetero_pp.link.in_process, hetero_pp.rpc.stage_link
      -> reconstruct, next stages, loss           stages.boundary, stages.worker (order: hetero_pp.pipeline.schedule)
      <- gradients, the same path back            stages.worker
      -> inner optimizer step                     hetero_pp.model.inner
    after H inner steps, per parameter tensor:
      theta_start - theta_local                   replica_groups.member.outer_round
      -> error feedback, top-k per chunk          hetero_pp.pseudo_gradient.error_feedback, .selection
      -> quantise                                 hetero_pp.pseudo_gradient.quantise
      -> contribution: a blob for each block      hetero_pp.pseudo_gradient.contribution
      -> sent by the member's session             replica_groups.member.session
           over gRPC, header and bytes unchanged  hetero_pp.rpc.exchange_client, replica_groups.exchange.server
      -> validate as it arrives, store            replica_groups.exchange.contribution_inbox, .log
      -> the rules close the round                replica_groups.exchange.runner, replica_groups.rounds.coordinator
      -> round record                             replica_groups.rounds.state (makes it), replica_groups.exchange.log
    each member, and the auditor, with the contributions that the record names:
      -> fetch, decode                            replica_groups.exchange.decided, hetero_pp.outer.apply_round
      -> mean, outer step                         hetero_pp.outer.step
      -> identical weights: hashes compared       replica_groups.exchange.exchange, replica_groups.exchange.auditor
    token embedding: split again                  hetero_pp.pipeline.subspace, stages.stage

Path of a bandwidth, from the YAML to a delayed byte:

    `lines` of the YAML, in bits per second       hetero_pp.config.lines
      -> the lines of each link                   hetero_pp.config.spec (each process reads the run's config.yaml)
      -> the links of a member                    hetero_pp.program.launch.member_process, hetero_pp.rpc.connections
      -> `up` when a frame leaves, `down` when    hetero_pp.rpc.link_end
         it arrives: it waits for its turn        hetero_pp.link.shaping

Path of a stage's death, from the process that dies to the page:

    the process ends                              hetero_pp.program.launch.supervisor (or a neighbour's stages.worker)
      -> the exchange is told                     replica_groups.exchange.server, replica_groups.exchange.exchange
      -> the incarnation ends, the group reforms  replica_groups.rounds.coordinator
      -> the event is dated and sent to watchers  replica_groups.exchange.reports
      -> the event changes the run's state        hetero_pp.program.report.state
           words, as the terminal prints them     hetero_pp.program.report.lines
           the page's frame, and its drawing      hetero_pp.program.view.run_view, view/page/topology.js

hetero_pp.program.launch.supervisor starts a process for each member; hetero_pp.program.launch.in_process starts a
thread for each. Every member of the run (hetero_pp.config.spec) runs replica_groups.member.take_part. In a notebook,
use `from hetero_pp import Run` (hetero_pp.program.notebook). In a training loop of your own, use `from hetero_pp import
SparseLoCo` (hetero_pp.outer.sparse_loco).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_pp.outer.sparse_loco import SparseLoCo
    from hetero_pp.program.notebook import Run

    __version__: str

__all__ = ["Run", "SparseLoCo", "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a class on first use, so that importing a part of the package does not wait for torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hetero-pp")
    if name == "Run":
        from hetero_pp.program.notebook import Run

        return Run
    if name == "SparseLoCo":
        from hetero_pp.outer.sparse_loco import SparseLoCo

        return SparseLoCo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
