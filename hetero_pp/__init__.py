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
      -> error feedback, top-k per chunk          hetero_pp.pseudo_gradient.error_feedback, .selection, .chunks
      -> quantise                                 hetero_pp.pseudo_gradient.quantise
      -> contribution                             hetero_pp.pseudo_gradient.contribution, .positions, .streams
      -> validate as it arrives                   replica_groups.exchange.contribution_inbox
      -> the exchange stores it, round record     replica_groups.exchange.exchange, replica_groups.exchange.log
           over gRPC                              replica_groups.exchange.server
    each member, and the auditor, with the contributions that the record names:
      -> fetch, decode                            hetero_pp.pseudo_gradient.contribution.ReceivedBlob
      -> mean, outer step                         hetero_pp.outer.apply_round, hetero_pp.outer.step
      -> identical weights: hashes compared       replica_groups.exchange.exchange, replica_groups.exchange.auditor
    token embedding: split again                  hetero_pp.pipeline.subspace, stages.stage

hetero_pp.program.launch.supervisor starts a process for each member; hetero_pp.program.launch.in_process starts a
thread for each. Every member of the run (hetero_pp.config.spec) runs replica_groups.member.take_part. In a notebook,
use `from hetero_pp import Run` (hetero_pp.program.notebook).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero_pp.program.notebook import Run

    __version__: str

__all__ = ["Run", "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import Run on first use, so that importing a part of the package does not wait for torch."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hetero-pp")
    if name == "Run":
        from hetero_pp.program.notebook import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
