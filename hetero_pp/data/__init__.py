"""From a corpus to batches: `corpora` (text), `tokenizers` (ids), `tokens` (one file), `batches` (tensors).

A streamed corpus goes another way to the same batches: `hub` (shards of text), `parts` (whose they are), `order`
(shuffled), `stream` (tokens and tensors). `sources` opens either.

Every part is a pure function of its settings, so all members of a run read the same tokens without talking.
"""
