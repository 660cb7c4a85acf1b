"""State, metrics, summary, pictures and the live view of a run, from its members' reports."""
