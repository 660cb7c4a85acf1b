"""LLaMA checkpoints in the format of the `transformers` library: written from a run, and read to start one."""
