"""State, metrics, summary, picture and the live view of a run, from its members' reports."""
