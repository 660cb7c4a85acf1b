"""Files and texts from strangers: those that are too deep, too large or no text are refused in one line."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hetero_pp.core.bounded import (
    DEPTH_MAX,
    parse_json,
    parse_ordinary_yaml,
    parse_yaml,
    read_bounded,
    read_bounded_json,
    yaml_complaint,
)
from hetero_pp.core.control_characters import without_controls


def _doubled(levels: int) -> str:
    """Return ten aliases per level: 10 ** levels values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE_YAML = {
    "aliases": (_doubled(9), "found more than 200,000 values, including repetitions by aliases"),
    "an alias in itself": ("a: &a [*a]", "found the alias *a inside its own anchor"),
    "lists": ("a: " + "[" * 3000 + "]" * 3000, "found lists and mappings more than 64 levels deep"),
    "mappings": ("a: " + "{b: " * 3000 + "}" * 3000, "found lists and mappings more than 64 levels deep"),
    "indented lists": ("- " * 3000 + "a", "found lists and mappings more than 64 levels deep"),
    "digits": ("a: " + "9" * 5000, "found a number of 5,000 digits, expected at most 18"),
    "hexadecimal digits": ("a: 0x" + "9" * 5000, "found a number of 5,002 digits, expected at most 400"),
    "an escape": ('a: "\\e]0;title\\a"', "found the control character U+001B in a text, expected none"),
    "an escape in a key": ('"\\e[2J": 1', "found the control character U+001B in a text, expected none"),
    "reordered text": ('a: "\\u202Egnp.exe"', "found the control character U+202E in a text, expected none"),
}


@pytest.mark.parametrize("with_lines", [False, True])
@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_is_refused_with_its_line(name: str, with_lines: bool) -> None:
    text, problem = HOSTILE_YAML[name]
    with pytest.raises(MarkedYAMLError) as found:
        parse_yaml(text, with_lines)
    assert yaml_complaint(Path("a.yaml"), found.value).partition(": ")[2] == f"not YAML: {problem}"


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", "a: !!int x", "a: !!float x", "a: !!binary x", "a: \0", "? {a: 1}\n: 1"]
)
def test_any_yaml_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse_yaml(text)
    except (YAMLError, ValueError) as error:
        assert "\n" not in yaml_complaint(Path("a.yaml"), error)


def test_a_yaml_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="found more than 4,194,304 bytes"):
        parse_yaml(" " * (4 * 2**20 + 1))


def test_honest_yaml_keeps_its_meaning() -> None:
    text = "a: &a {rank: 1/8}\nb: {<<: *a, bits: 4}\nc: [*a, *a]\nd: 0.1000000000000000055511151231257827\nname: Größe"
    assert parse_yaml(text)["b"] == {"rank": "1/8", "bits": 4}
    assert parse_yaml(text, with_lines=True)["c"][1] == {"rank": "1/8"}


SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))


def _plain(node: Any) -> Any:
    """Return ruamel.yaml's mappings and lists as plain ones."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_libyaml_reads_what_ruamel_yaml_reads(path: Path) -> None:
    """Entries are in the same order, because rows and cells are."""
    found = parse_ordinary_yaml(path.read_bytes())
    assert found is not None
    assert json.dumps(found) == json.dumps(_plain(parse_yaml(path.read_bytes(), with_lines=True)))


PIECES = ["a", "b: ", ": ", "\n", "- ", "\n  ", "\n- ", "{", "}", "[", "]", ", ", "1", "0x1", "1_0", "'", '"', "#"]
PIECES += [" #", "&a ", "*a ", "<<: ", "!t ", "|", "|\n  x\n", "> \n", "?", "~", "null", "yes", "true", "1e3", "1."]
PIECES += [
    "-",
    "\t",
    "--- ",
    "...",
    "%",
    "@",
    "\\n",
    "é",
    "key: v\n",
    "  y: [1, 2]\n",
    "\r\n",
    ".5",
    "=",
    "012",
    "1:30",
]


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join))
def test_libyaml_reads_no_text_otherwise(text: str) -> None:
    found = parse_ordinary_yaml(text.encode())
    with suppress(YAMLError, ValueError, TypeError):  # libyaml takes some texts that ruamel.yaml refuses
        assert found is None or found == _plain(parse_yaml(text, with_lines=True))


OTHERS = [
    "a: !!str 1",
    "{a: 1, a: 2}",
    "{<<: a}",
    "%YAML 1.1\n---\na: yes",
    "a: 1\n---\nb: 1",
    "{? [1] : 2}",
    "a: 0o17",
]


@pytest.mark.parametrize("text", [*(text for text, _ in HOSTILE_YAML.values()), *OTHERS], ids=lambda text: text[:20])
def test_libyaml_leaves_what_is_not_ordinary(text: str) -> None:
    assert parse_ordinary_yaml(text.encode()) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * (DEPTH_MAX + 2) + "]" * (DEPTH_MAX + 2), '{"a":' * 500 + "1" + "}" * 500]
)
def test_deep_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 64 levels deep"):
        parse_json(text)


def test_json_with_a_number_of_too_many_digits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found a number of 5,000 digits, expected at most 400"):
        parse_json("[" + "9" * 5000 + "]")
    assert parse_json(json.dumps({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}


def test_devices_pipes_and_large_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.json").write_text(" " * 200)
    for name in ("zero", "pipe"):
        with pytest.raises(ValueError, match="found a pipe or a device, expected a file"):
            read_bounded(tmp_path / name, 100)
    with pytest.raises(ValueError, match="found more than 100 bytes, expected at most that"):
        read_bounded_json(tmp_path / "large.json", 100)


def test_control_characters_are_escaped_and_other_languages_stay() -> None:
    assert without_controls("\x1b[31mred\x9b\u202e\udcff") == "\\x1b[31mred\\x9b\\u202e\\udcff"
    assert without_controls("Größe\N{NO-BREAK SPACE}日本") == "Größe\N{NO-BREAK SPACE}日本"
    assert without_controls("two\nlines") == "two lines"
