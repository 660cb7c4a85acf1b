"""Configuration of a run: its YAML, and everything that follows from it alone."""
