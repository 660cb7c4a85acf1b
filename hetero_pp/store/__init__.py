"""Where a run keeps what it cannot compute again: a folder, or an object store that all its hosts reach."""
