"""The `data` section of the configuration."""

from __future__ import annotations

from pydantic import Field

from hetero_pp.settings import Ratio, Settings


class DataSettings(Settings):
    """What is read, how it becomes tokens, and what is kept apart for validation."""

    corpus: str = Field(
        "standard-library",
        description="`standard-library` (the source code of Python's), `docstrings` (its docstrings), or a "
        "path to a file or folder of .txt, .jsonl and .parquet",
    )
    text_field: str = Field("text", description="the field or column that holds the text of .jsonl and .parquet")
    tokenizer: str = Field("bytes", description="`bytes`, or a path to a tokenizer.json or to a folder that holds one")
    sequence_length: int = Field(128, ge=1, description="L: the tokens predicted per sequence")
    validation_share: Ratio = Field(0.02, gt=0, lt=1, description="share of the tokens never trained on")
    validation_sequences: int = Field(64, ge=1, description="how many sequences the validation loss is computed on")
    repeat: bool = Field(True, description="whether training may read the corpus more than once")
