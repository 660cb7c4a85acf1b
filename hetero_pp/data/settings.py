"""The `data` section of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from hetero_pp.core.settings import NotPartOf, Ratio, Settings

STANDARD_LIBRARY = "standard-library"
DOCSTRINGS = "docstrings"
PROSE = "prose"
INSTALLED = (STANDARD_LIBRARY, DOCSTRINGS, PROSE)  # corpora that every installation of hetero-pp contains
STREAMED = "hf:"  # prefix of the name of a streamed corpus: it is read during training and never encoded as a whole
_HUB_NAME = re.compile(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*")


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("expected a name, or null for none")
    return value


Name = Annotated[str, BeforeValidator(_not_empty)]


class StreamSettings(Settings):
    """Settings of a streamed corpus: the splits to read, and the size of the shuffle buffer."""

    subset: Name | None = Field(None, description="subset of a dataset that has several, such as `en` of allenai/c4")
    revision: Name | None = Field(None, description="commit, branch or tag of a dataset on the Hub")
    split: Name = Field("train", description="split to train on")
    validation_split: Name | None = Field(
        None, description="split to validate on; by default, documents of `split` are held out"
    )
    validation_documents: int = Field(
        2000,
        ge=1,
        description="documents held out for validation if there is no validation_split, "
        "from the start of the first shard with text",
    )
    shuffle_buffer: int = Field(10_000, ge=1, description="documents in a replica's shuffle buffer")


class DataSettings(Settings):
    """Settings of the corpus, its tokenization, and the held-out validation data."""

    corpus: Annotated[str, NotPartOf.EITHER] = Field(
        "standard-library",
        description="`standard-library` (Python's source code), `docstrings` (its docstrings), `prose` (sentences "
        "from the docstrings of torch, numpy, scipy, sympy, networkx and matplotlib), or the path of a file or "
        "folder with .txt, .jsonl and .parquet. `hf:` streams a dataset of the Hugging Face Hub, a folder in the "
        "Hub's layout, or a pattern of .jsonl, .json.gz, .jsonl.zst or .parquet files",
    )
    stream: Annotated[StreamSettings, NotPartOf.OUTCOME] = Field(
        StreamSettings(), description="settings of a streamed corpus (`hf:`)"
    )
    text_field: str = Field("text", description="field or column with the text in .jsonl and .parquet")
    tokenizer: Annotated[str, NotPartOf.EITHER] = Field(
        "bytes", description="`bytes`, or the path of a tokenizer.json or of a folder that contains one"
    )
    sequence_length: int = Field(128, ge=1, description="tokens predicted per sequence (L in the papers)")
    validation_share: Ratio = Field(
        0.02, gt=0, lt=1, description="share of the tokens held out for validation, if the corpus is not streamed"
    )
    validation_sequences: int = Field(64, ge=1, description="sequences that the validation loss is computed on")
    repeat: Annotated[bool, NotPartOf.OUTCOME] = Field(
        True, description="whether training may read the corpus more than once"
    )

    @property
    def streamed(self) -> str | None:
        """The dataset, folder or pattern of a streamed corpus; None for any other."""
        return self.corpus.removeprefix(STREAMED) if self.corpus.startswith(STREAMED) else None

    @property
    def names_tokenizer(self) -> bool:
        """Whether the user named a tokenizer. Without one, a run reads bytes and a table trains an encoding."""
        return "tokenizer" in self.model_fields_set

    def with_absolute_paths(self) -> DataSettings:
        """Return a copy whose paths are absolute."""
        changes: dict[str, str] = {}
        if self.streamed is not None:
            if not is_on_the_hub(self.streamed):
                changes["corpus"] = STREAMED + _absolute(self.streamed)
        elif self.corpus not in INSTALLED:
            changes["corpus"] = _absolute(self.corpus)
        if self.tokenizer != "bytes":
            changes["tokenizer"] = _absolute(self.tokenizer)
        return self.model_copy(update=changes)


def is_on_the_hub(target: str) -> bool:
    """Return whether a streamed corpus names a Hub dataset: `name` or `owner/name`, and no such local path exists."""
    return _HUB_NAME.fullmatch(target) is not None and not Path(target).exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
