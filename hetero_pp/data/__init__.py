"""From a corpus to batches: `corpora` (text), `tokenizers` (ids), `tokens` (one file), `batches` (tensors).

Every part is a pure function of its settings, so all members of a run read the same tokens without talking.
"""
