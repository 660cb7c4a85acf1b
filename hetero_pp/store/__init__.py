"""Storage for the data of a run that cannot be recomputed: a folder, or an object store that all hosts reach."""
