"""What a run is: the whole YAML, and all that follows from it alone, the same in every process."""
