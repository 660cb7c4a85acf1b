"""Starts and supervises the members of a run, as processes, ranks or threads."""
