"""Predicted timeline as a Perfetto trace: a process for each replica, a track for each stage and hop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetero_pp.core.files import whole
from hetero_pp.simulator.events import OnSpan

NANOSECONDS = 1e9


@dataclass(frozen=True)
class Span:
    """Activity on one track of a replica. Times are in seconds."""

    replica: str
    track: str
    name: str
    start: float
    end: float


class Timeline:
    """Collects spans of the first replica behind each name."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def of(self, replica: str) -> OnSpan:
        """Return the callback that records a replica's spans."""

        def on_span(track: str, what: str, micro_batch: int, start: float, end: float) -> None:
            name = f"{what} {micro_batch}" if what in ("forward", "backward", "activation", "gradient") else what
            self.spans.append(Span(replica, track, name, start, end))

        return on_span

    def write(self, path: Path) -> None:
        """Write a trace that ui.perfetto.dev opens."""
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        tracks: dict[tuple[str, str], int] = {}
        with whole(path) as part, part.open("wb") as file:
            builder = StreamingTraceProtoBuilder(file)
            for span in self.spans:
                for key in ((span.replica, ""), (span.replica, span.track)):
                    if key not in tracks:
                        tracks[key] = len(tracks) + 1
                        packet = builder.create_packet()
                        packet.track_descriptor.uuid = tracks[key]
                        packet.track_descriptor.name = span.track if key[1] else span.replica
                        if key[1]:
                            packet.track_descriptor.parent_uuid = tracks[span.replica, ""]
                        builder.write_packet(packet)
                for time, kind in ((span.start, TrackEvent.TYPE_SLICE_BEGIN), (span.end, TrackEvent.TYPE_SLICE_END)):
                    packet = builder.create_packet()
                    packet.timestamp = round(time * NANOSECONDS)
                    packet.trusted_packet_sequence_id = 1
                    packet.track_event.type = kind
                    packet.track_event.track_uuid = tracks[span.replica, span.track]
                    packet.track_event.name = span.name
                    builder.write_packet(packet)
