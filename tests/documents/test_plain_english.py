"""Docstrings and documents consist of short, complete sentences that name processes by nouns.

The rules: no fragments such as "Of what is sent", no `who` or `whom` for a process, no docstring that only says
"See ...", no sentence of more than 30 words. Code, tables, headings and generated pages are not checked.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hetero_pp", "stages", "replica_groups", "benchmarks", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md")
GENERATED = ("_pb2.py", "_pb2_grpc.py", "docs/results.md")
MOST_WORDS = 30

UNFINISHED: dict[str, int] = {}
"""Number of complaints about folders that are not rewritten yet. It may only shrink: lower it as a folder improves."""

FRAGMENT = re.compile(r"(Of|Whom|Whose|Who|Which|What|That (?!is\b|are\b|was\b|way\b|file\b|makes\b|would\b|can\b))\b")
PEOPLE = r"(?:users?|people|persons?|operators?|readers?|authors?|attackers?|anyone|someone|everyone|those|you)"
PROCESS = (
    r"(?:is|are|was|were|has|have|had|does|do|can|cannot|may|must|trains?|sends?|sent|holds?|joins?|waits?|comes?|came|"
    r"contributes?|dials?|reads?|asks?|starts?|knows?|takes?|saves?|leaves?|left|fails?|ends?|goes|serves?|listens?)"
)
WHO = re.compile(rf"\bwhom\b|\bwhoever\b|(?<!\w)(?<!{'users '})who {PROCESS}\b", re.IGNORECASE)
OF_PEOPLE = re.compile(rf"\b{PEOPLE} who\b", re.IGNORECASE)
SEE = re.compile(r"See [^.]*\.?")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|al|no|fig|sec)\.", re.IGNORECASE)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose: paragraphs and list items, without code, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        if not stripped or re.match(r"([-*>|#]|\d+\.)\s|\||#|!\[", stripped):
            yield from _sentences_of(" ".join(block))
            block = []
        if stripped and not stripped.startswith(("|", "#", ">>>", "![")):
            block.append(re.sub(r"^([-*]|\d+\.)\s+", "", stripped))


def _sentences_of(block: str) -> Iterator[str]:
    plain = re.sub(r"`+[^`]*`+", "`code`", block)
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", plain)
    plain = ABBREVIATION.sub(r"\1", plain)
    yield from filter(None, re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*`]*[A-Z`])", plain))


def complaints(text: str, is_docstring: bool) -> Iterator[str]:
    """Yield what a docstring or a page has against the rules."""
    if is_docstring and SEE.fullmatch(text.strip()):
        yield f"says only: {text.strip()}"
    for sentence in sentences(text):
        shown = sentence if len(sentence) < 100 else f"{sentence[:97]}..."
        if FRAGMENT.match(sentence.lstrip("*_\"'(")) and "?" not in sentence:
            yield f"begins as a fragment: {shown}"
        if WHO.search(OF_PEOPLE.sub("", sentence)):
            yield f"who or whom for a process: {shown}"
        if (words := len(re.findall(r"\S*\w\S*", sentence))) > MOST_WORDS:
            yield f"{words} words: {shown}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        for one in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                yield one.lineno, ast.unparse(one.value) and one.value.value


def found_in(path: Path) -> list[str]:
    texts = docstrings(path) if path.suffix == ".py" else [(1, path.read_text())]
    name = path.relative_to(ROOT)
    return [f"{name}:{line}: {one}" for line, text in texts for one in complaints(text, path.suffix == ".py")]


if __name__ == "__main__":
    import sys

    counts: Counter = Counter()
    kinds: Counter = Counter()
    for pkg in PACKAGES:
        for p in sorted((ROOT / pkg).rglob("*.py")):
            if p.name.endswith(GENERATED):
                continue
            for c in found_in(p):
                counts["/".join(p.relative_to(ROOT).parts[:2]) if len(p.relative_to(ROOT).parts) > 2 else pkg] += 1
                kinds[
                    (pkg, c.split(": ")[1].split(" ", 1)[-1] if "words" in c.split(": ")[1] else c.split(": ")[1])
                ] += 1
                if len(sys.argv) > 1 and str(p.relative_to(ROOT)).startswith(sys.argv[1]):
                    print(c)
    for g in PAGES:
        for p in sorted(ROOT.glob(g)):
            if str(p).endswith(GENERATED):
                continue
            for c in found_in(p):
                counts[p.name] += 1
                if len(sys.argv) > 1 and sys.argv[1] in ("docs", p.name):
                    print(c)
    if len(sys.argv) == 1:
        print(counts)
        print(kinds)
