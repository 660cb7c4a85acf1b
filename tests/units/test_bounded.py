"""Files and texts from strangers: those that are too deep, too large or no text are refused in one line."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero_pp.core.bounded import DEPTH_MAX, parse_json, read_bounded, read_bounded_json
from hetero_pp.core.text import without_controls
from hetero_pp.core.yaml_reader import Items, Section, YamlError, parse_yaml, yaml_complaint


def _doubled(levels: int) -> str:
    """Return ten aliases per level: 10 ** levels values in a few hundred bytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE_YAML = {
    "aliases": (_doubled(9), "found more than 200,000 values, including repetitions by aliases"),
    "an alias in itself": ("a: &a [*a]", "found the alias *a inside its own anchor"),
    "lists": ("a: " + "[" * 500 + "]" * 500, "found lists and mappings more than 64 levels deep"),
    "mappings": ("a: " + "{b: " * 500 + "}" * 500, "found lists and mappings more than 64 levels deep"),
    "indented lists": ("- " * 500 + "a", "found lists and mappings more than 64 levels deep"),
    "digits": ("a: " + "9" * 5000, "found a number of 5,000 digits, expected at most 18"),
    "hexadecimal digits": ("a: 0x" + "9" * 5000, "found a number of 5,002 digits, expected at most 400"),
    "an escape": ('a: "\\e]0;title\\a"', "found the control character U+001B in a text, expected none"),
    "an escape in a key": ('"\\e[2J": 1', "found the control character U+001B in a text, expected none"),
    "reordered text": ('a: "\\u202Egnp.exe"', "found the control character U+202E in a text, expected none"),
}


HOSTILE_YAML |= {
    "a tag": ("a: !!int x", "found the tag `tag:yaml.org,2002:int`, expected none"),
    "a directive": ("%YAML 1.1\n---\na: yes", "found a directive, expected none"),
    "two documents": ("a: 1\n---\nb: 1", "found a second document, expected none"),
    "a list as a key": ("{? [1] : 2}", "found a list or a mapping as a key, expected a text"),
    "a key twice": ("b: 1\nb: 2", "found the key `b` twice, expected it once"),
    "a text that is merged": ("<<: a", "found something else to merge by `<<`, expected mappings"),
    "another number": ("a: 0o17", "found the number `0o17`, expected a finite decimal one"),
    "infinity": ("a: -.inf", "found the number `-.inf`, expected a finite decimal one"),
    "no anchor": ("a: *b", "found the alias *b without an anchor before it"),
    "no text": ("a: \0", "control characters are not allowed"),
    "a list that stays open": ("a: [1", "did not find expected ',' or ']'"),
}


@pytest.mark.parametrize("name", HOSTILE_YAML)
def test_hostile_yaml_is_refused_with_its_line(name: str) -> None:
    text, problem = HOSTILE_YAML[name]
    with pytest.raises(YamlError) as found:
        parse_yaml(text)
    assert yaml_complaint(Path("a.yaml"), found.value).partition(": ")[2] == f"not YAML: {problem}"
    assert 1 <= found.value.line <= text.count("\n") + 1


def test_a_yaml_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="found more than 4,194,304 bytes"):
        parse_yaml(" " * (4 * 2**20 + 1))


def test_honest_yaml_keeps_its_meaning() -> None:
    text = "a: &a {rank: 1/8}\nb: {<<: *a, bits: 4}\nc: [*a, *a]\nd: 0.1000000000000000055511151231257827\nname: Größe"
    assert parse_yaml(text)["b"] == {"rank": "1/8", "bits": 4}
    assert parse_yaml(text)["c"][1] == {"rank": "1/8"}
    numbers = "[.5, 1_0.5e3, 012, -3, +1e-5, 1., 2001-01-01, 1:30, '.5', =]"
    assert parse_yaml(numbers) == [0.5, 10500.0, 12, -3, 1e-5, 1.0, "2001-01-01", "1:30", ".5", "="]


SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("**/*.yaml"))


def _plain(node: Any) -> Any:
    """Return ruamel.yaml's mappings and lists as plain ones."""
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node


def _same_lines(found: Any, theirs: Any) -> None:
    """Compare the line of every key and item with ruamel.yaml's."""
    if isinstance(found, Section | Items):
        places = found if isinstance(found, Section) else range(len(found))
        lines = {place: theirs.lc.data[place][0] + 1 for place in places if place in (theirs.lc.data or {})}
        assert (found.lines if isinstance(found, Section) else dict(enumerate(found.lines))) == lines
        for place in places:
            _same_lines(found[place], theirs[place])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_yaml_means_what_ruamel_yaml_reads(path: Path) -> None:
    """Entries are in the same order, because rows and cells are."""
    found, theirs = parse_yaml(path.read_bytes()), YAML().load(path)
    assert json.dumps(found) == json.dumps(_plain(theirs))
    _same_lines(found, theirs)


PIECES = ["a", "b: ", ": ", "\n", "- ", "\n  ", "\n- ", "{", "}", "[", "]", ", ", "1", "0x1", "1_0", "'", '"', "#"]
PIECES += [" #", "&a ", "*a ", "<<: ", "!t ", "|", "|\n  x\n", "> \n", "?", "~", "null", "yes", "true", "1e3", "1."]
PIECES += ["-", "\t", "--- ", "...", "%", "@", "\\n", "é", "key: v\n", "  y: [1, 2]\n", "\r\n", ".5", "=", "012"]
PIECES += ["1:30"]


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=10).map("".join))
def test_any_text_is_refused_or_means_what_ruamel_yaml_reads(text: str) -> None:
    hypothesis.assume(not re.search(r"[>|][^\n]*\n+#", text))  # libyaml takes the first line of a block for a comment
    try:
        found = parse_yaml(text.encode())
    except ValueError as error:
        assert "\n" not in yaml_complaint(Path("a.yaml"), error)
        return
    with suppress(YAMLError, ValueError, TypeError):  # libyaml takes some texts that ruamel.yaml refuses
        assert found == YAML(typ="safe", pure=True).load(text)


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
