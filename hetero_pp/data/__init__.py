"""Turns a corpus into batches.

- Encoded corpora: `corpora` (text), `tokenizers` (ids), `tokens` (one file of ids), `batches` (tensors).
- Streamed corpora: `stream` (division among replicas, shuffling, tokens and tensors).
- `sources` opens either kind.

Each step is a pure function of the settings, so all members of a run read the same tokens without communication.
"""
