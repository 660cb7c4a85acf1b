"""The `data` section of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from hetero_pp.settings import NotPartOf, Ratio, Settings

STANDARD_LIBRARY = "standard-library"
DOCSTRINGS = "docstrings"
PROSE = "prose"
INSTALLED = (STANDARD_LIBRARY, DOCSTRINGS, PROSE)
"""Corpora that every installation of hetero-pp contains."""
STREAMED = "hf:"
"""Prefix of the name of a streamed corpus: it is read during training and never encoded as a whole."""
_HUB_NAME = re.compile(r"[\w-]+|[\w-][\w.-]*/[\w-][\w.-]*")


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("expected a name, or null for none")
    return value


Name = Annotated[str, BeforeValidator(_not_empty)]


class StreamSettings(Settings):
    """Settings of a streamed corpus: the splits to read, and the size of the shuffle buffer."""

    subset: Name | None = Field(None, description="of a dataset that has several, such as `en` of allenai/c4")
    revision: Name | None = Field(None, description="commit, branch or tag of a dataset on the Hub")
    split: Name = Field("train", description="the split to train on")
    validation_split: Name | None = Field(
        None, description="the split to validate on; by default documents of `split` are held out for that"
    )
    validation_documents: int = Field(
        2000, ge=1, description="how many are held out, from the start of the first shard, without a validation_split"
    )
    shuffle_buffer: int = Field(
        10_000, ge=1, description="documents that a replica reads ahead and shuffles among themselves"
    )


class DataSettings(Settings):
    """Settings of the corpus, its tokenization, and the held-out validation data."""

    corpus: Annotated[str, NotPartOf.EITHER] = Field(
        "standard-library",
        description="`standard-library` (the source code of Python's), `docstrings` (its docstrings), `prose` "
        "(sentences of the docstrings of torch, numpy, scipy, sympy, networkx and matplotlib), a path to a file or "
        "folder of .txt, .jsonl and .parquet, or `hf:` and a dataset of the Hugging Face Hub, a folder like one, or a "
        "pattern of .jsonl, .json.gz, .jsonl.zst or .parquet files, which is streamed",
    )
    stream: Annotated[StreamSettings, NotPartOf.OUTCOME] = Field(
        StreamSettings(), description="for a corpus that starts with `hf:`"
    )
    text_field: str = Field("text", description="the field or column that holds the text of .jsonl and .parquet")
    tokenizer: Annotated[str, NotPartOf.EITHER] = Field(
        "bytes", description="`bytes`, or a path to a tokenizer.json or to a folder that holds one"
    )
    sequence_length: int = Field(128, ge=1, description="L: the tokens predicted per sequence")
    validation_share: Ratio = Field(
        0.02, gt=0, lt=1, description="share of the tokens never trained on; of a corpus that is not streamed"
    )
    validation_sequences: int = Field(64, ge=1, description="how many sequences the validation loss is computed on")
    repeat: Annotated[bool, NotPartOf.OUTCOME] = Field(
        True, description="whether training may read the corpus more than once"
    )
    clusters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="into how many clusters of windows that are alike the text is put, which are then shared out among "
        "replicas: their shards differ, as DiLoCo's non-i.i.d. ones do. By default a replica's windows are any",
    )

    @model_validator(mode="after")
    def _a_stream_is_not_known(self) -> DataSettings:
        if self.clusters is not None and self.streamed is not None:
            raise ValueError(
                f"found `clusters` with {self.corpus}, which is streamed, expected a corpus that is encoded once: "
                "clusters are of all of its text"
            )
        return self

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
