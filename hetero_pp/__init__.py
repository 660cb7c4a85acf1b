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
           until the round is decided             replica_groups.member.error_feedback
      -> quantise                                 hetero_pp.pseudo_gradient.quantise
      -> contribution: a blob for each block      hetero_pp.pseudo_gradient.contribution
      -> sent by the session, small ones joined   replica_groups.member.session
           over gRPC, or by the store             hetero_pp.rpc.exchange_client, replica_groups.exchange.server
           (a call ends in the server's method of its name; the shared base is hetero_pp.rpc.exchange_service)
      -> validate as it arrives, store            replica_groups.exchange.contribution_inbox, .log
      -> the rules close the round                replica_groups.rounds.coordinator, .state (makes the record)
      -> its record is limited, written           replica_groups.exchange.runner (limits: .magnitudes), .log
      -> members that ask for the record get it   replica_groups.exchange.decided (waits in .runner)
    each member with the contributions that the record names, and the auditor (replica_groups.exchange.replay):
      -> fetch, unless it is the member's own     replica_groups.member.outer_round, replica_groups.exchange.decided
      -> decode                                   hetero_pp.pseudo_gradient.contribution, .streams
      -> mean, outer step                         hetero_pp.outer.apply_round, hetero_pp.outer.step
      -> identical weights: hashes compared       replica_groups.rounds.coordinator
    token embedding: split again                  hetero_pp.pipeline.subspace, stages.stage

Path of a bandwidth, from the YAML to a delayed byte:

    `lines` of the YAML, in bits per second       hetero_pp.config.lines
      -> the lines of each link                   hetero_pp.config.spec (from the config.yaml of the run)
      -> the lines of this process, shared by all hetero_pp.program.launch.member_process
         of a machine's links                     hetero_pp.rpc.connections
      -> a frame waits for its turn of `up`       hetero_pp.rpc.link_end (leaving), hetero_pp.link.shaping
      -> a message waits until `down` had it      hetero_pp.rpc.link_end (arriving), hetero_pp.link.shaping

Path of a stage's death, from the process that dies to the page:

    the process ends                              hetero_pp.program.launch.supervisor (starts it again; only its own
                                                  host's terminal and page say so)
      -> the exchange is told                     hetero_pp.rpc.exchange_service (died), replica_groups.exchange.server
      -> the incarnation ends, the group stops    replica_groups.rounds.coordinator (makes the events)
      -> members hear that they are suspended     replica_groups.exchange.runner
      -> the event is dated and sent to watchers  replica_groups.exchange.reports
      -> the launcher keeps it                    hetero_pp.program.launch.command, hetero_pp.program.report.recorder
      -> the event changes the run's state        hetero_pp.program.report.state
           words of the terminal and the page     hetero_pp.program.report.lines
           the page's frame, sent, and drawn      hetero_pp.program.view.run_view, .server, page/topology.js, words.js
    the new process joins                         replica_groups.member.take_part, replica_groups.exchange.exchange
    the group resumes at the inner step           replica_groups.rounds.coordinator (says where), stages.worker
    A neighbour whose link broke tells the exchange, too (replica_groups.member.take_part): then its own incarnation
    ends, unless that of the dead one has. Without either, silence ends the incarnation after the lease.

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
