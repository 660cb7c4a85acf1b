"""The settings that a run is started with, and their validation."""
