"""Load the spec of a run from its YAML: the first step of every process and command of a run."""

from __future__ import annotations

from hetero_pp.config.changed_keys import read_changes
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile


def read_run(folder: RunFolder) -> RunSpec:
    """Return the run in a folder. Raises ConfigError with file and line."""
    file = ConfigFile(folder.config, kept=True)
    try:
        return RunSpec(file.config, needed_vocabulary(file.config), read_changes(folder.changes))
    except ConfigError as error:
        raise file.located(error) from None


def read_trained(folder: RunFolder) -> RunSpec:
    """Return the run in a folder, which has trained something. Raises ConfigError for a rehearsal, too."""
    spec = read_run(folder)
    require_trained(spec.config, folder.path)
    return spec


def require_trained(config: RunConfig, where: object) -> None:
    """Raise ConfigError for a rehearsal."""
    if config.rehearsal is not None:
        raise ConfigError((), f"{where}: found a rehearsal, which trained nothing, expected a run")


def config_of(folder: RunFolder) -> RunConfig:
    """Return the configuration in the folder of a run, or of a rehearsal. Raises ConfigError with file and line."""
    return ConfigFile(folder.config, kept=True).config


def spec_of(file: ConfigFile) -> RunSpec:
    """Return the run of a YAML. Reads only the vocabulary of its tokenizer, not its corpus. Raises ConfigError."""
    config = file.config.with_absolute_paths()
    try:
        config.require_grouped()
        known = None if config.model.vocabulary is not None else load_tokenizer(config.data).vocabulary
        return RunSpec(config, known)
    except ConfigError as error:
        raise file.located(error) from None


def needed_vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary of the tokenizer; None for a rehearsal that does not need it. Raises ConfigError."""
    if config.rehearsal is not None and config.model.vocabulary is not None:
        return None
    return load_tokenizer(config.data).vocabulary
