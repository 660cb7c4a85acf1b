"""The coordinator's rules as a pure state machine: events in, effects out, without clock or I/O."""
