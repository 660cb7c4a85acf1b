"""The program around the method: the whole YAML, launching, recording, the command line."""
