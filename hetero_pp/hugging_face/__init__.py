"""LLaMA checkpoints as the `transformers` library has them: written from a run, and read to start one."""
