"""Docstrings and documents consist of short, complete sentences that name processes by nouns.

No sentence begins as a fragment ("Of what is sent."), uses `whom`, or `who` for a process, or has more than 30 words.
No docstring says only "See ...". Code, tables, headings and generated pages are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("hetero_pp", "stages", "replica_groups", "docs", "benchmarks", "tests")
GENERATED = ("_pb2.py", "results.md", "results_tables.md")

FRAGMENT = re.compile(r"(?:Of|Whom|Whoever|Whose|Who|Which|What|That (?:who|it|its|the|an?|no|nobody|something))\b")
PEOPLE = r"(?:users?|people|operators?|readers?|authors?|attackers?|anyone|someone|everyone)"
VERB = r"(?:is|are|was|were|ha[sd]|have|does|do|can|may|must|else|sent|left|goes|\w{3,}s)"
"""A verb that follows `who`. Most verbs of processes end in s: trains, holds, joins, dials."""
WHO = re.compile(rf"\b(?:whom|whoever|who {VERB})\b", re.IGNORECASE)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs and list items."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    indent = min((len(line) - len(line.lstrip()) for line in text.splitlines()[1:] if line.strip()), default=0)
    block = ""
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        is_code = line.startswith(" " * (indent + 4)) or stripped.startswith(("|", "│", "├", "└", "#", ">>>", "!["))
        starts = re.match(r"(?:[-*>]|\d+\.) |[\w.`]+: ", stripped)
        if not stripped or is_code or starts:
            yield from _split(block)
            block = ""
        if not is_code:
            block += " " + stripped[starts.end() if starts else 0 :]


def _split(block: str) -> Iterator[str]:
    plain = re.sub(r"`+[^`]*`+", "`code`", block)
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", plain).strip()
    return filter(None, re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*[A-Z`])", plain))


def complaints(text: str) -> Iterator[str]:
    if re.fullmatch(r"See [^.]*\.?", text.strip()):
        yield f"says nothing else: {text.strip()}"
    for sentence in sentences(text):
        shown = sentence if len(sentence) < 100 else f"{sentence[:97]}..."
        if FRAGMENT.match(sentence.lstrip("*_\"'(")) and "?" not in sentence:
            yield f"begins as a fragment: {shown}"
        if WHO.search(re.sub(rf"\b{PEOPLE} who\b", "", sentence, flags=re.IGNORECASE)):
            yield f"`who` for a process: {shown}"
        if (words := len(re.findall(r"\S*\w\S*", sentence))) > 30:
            yield f"{words} words, expected at most 30: {shown}"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, or of a page."""
    if path.suffix == ".md":
        yield 1, path.read_text()
    for node in ast.walk(ast.parse("" if path.suffix == ".md" else path.read_text())):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, one.value.value


def parts() -> dict[str, list[Path]]:
    """Return the files by part: a sub-package such as `hetero_pp/rpc`, a page, or the files of a folder."""
    found: dict[str, list[Path]] = {}
    for path in sorted(
        [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.[mp][dy]"))]
    ):
        if not path.name.endswith(GENERATED) and "results" not in path.parts:
            name = path.relative_to(ROOT)
            found.setdefault(str(name) if path.suffix == ".md" else "/".join(name.parts[:-1][:2]), []).append(path)
    return found


PARTS = parts()


@pytest.mark.parametrize("part", PARTS)
def test_sentences_are_plain(part: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {one}"
        for path in PARTS[part]
        for line, text in texts(path)
        for one in complaints(text)
    ]
    assert not found, "\n".join([f"{part}: {len(found)} complaints", *found])
