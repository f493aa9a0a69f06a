"""Counts the words of the user pages that readers stumble over, and draws sentences from them.

    python tests/prose.py                  a line for each page, and the sums
    python tests/prose.py PAGE...          these pages, and each of their sentences that is too long
    python tests/prose.py --draw 60        so many sentences of all user pages, by --seed TEXT
    python tests/prose.py --draw 60 --from DIR      of the pages below another directory

Prose is what is left of a page without code, tables, headings and comments.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Contributors read these, or a program writes them.
NOT_FOR_USERS = {
    "docs/architecture.md",
    "docs/cli.md",
    "docs/configuration.md",
    "docs/dependencies.md",
    "docs/testing.md",
}

QUESTIONS = re.compile(r"\b(what|whatever|who|whom|whoever|whose)\b", re.IGNORECASE)
NEGATIONS = re.compile(r"\b(nobody|nothing|none|no|never|nowhere)\b", re.IGNORECASE)
EXAMPLES = re.compile(r"\b(for example|such as)\b", re.IGNORECASE)

WORDS_MAX = 35


def user_pages() -> list[Path]:
    """README.md and the pages below docs/ that a user reads."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [(page, page.relative_to(ROOT).as_posix()) for page in pages]
    return [
        page
        for page, name in names
        if name not in NOT_FOR_USERS and not name.startswith("docs/design/")
    ]


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without code, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts = re.match(r" *([-*+]|\d+\.) ", line)
        is_prose = line.strip() and not re.match(r" *(\||#|<|:::|!\[|---)", line)
        if lines and (starts or not is_prose):
            yield " ".join(lines)
            lines = []
        if is_prose:
            lines.append(re.sub(r"^ *([-*+]|\d+\.|>) +", "", line).strip())


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose."""
    for paragraph in paragraphs(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        yield from re.split(r"(?<=[.!?])[\"')*]* +(?=[\"'(*`A-Z0-9])", plain)


def words(sentence: str) -> list[str]:
    """The words of a sentence. A piece of code is one word."""
    return re.findall(r"`[^`]*`|[\w][\w'’./-]*", sentence)


def counts(text: str) -> tuple[int, int, int, int, list[str]]:
    """Words; question words, negations and examples; sentences that are too long."""
    total, questions, negations, examples, long = 0, 0, 0, 0, []
    for sentence in sentences(text):
        plain = re.sub(r"`[^`]*`", "", sentence)
        total += len(words(sentence))
        questions += len(QUESTIONS.findall(plain))
        negations += len(NEGATIONS.findall(plain))
        examples += len(EXAMPLES.findall(plain))
        if len(words(sentence)) > WORDS_MAX:
            long.append(sentence)
    return total, questions, negations, examples, long


def show(pages: list[Path], lists: bool) -> None:
    """Prints the counts of each page and of all, each count for 1,000 words."""
    sums = [0, 0, 0, 0, 0]
    print("words  what/who  no/never  examples  long  page")

    def line(found: list[int], name: str) -> None:
        total, *rest, long = found
        rates = [f"{1000 * count / max(total, 1):8.1f}" for count in rest]
        print(f"{total:5}  {'  '.join(rates)}  {long:4}  {name}")

    for page in pages:
        *found, long = counts(page.read_text(encoding="utf-8"))
        row = [*found, len(long)]
        sums = [one + other for one, other in zip(sums, row, strict=True)]
        line(row, page.resolve().relative_to(ROOT).as_posix())
        for sentence in long if lists else []:
            print(f"       {len(words(sentence))} words: {sentence}")
    line(sums, "all")


def draw(pages: list[Path], count: int, seed: str) -> None:
    """Prints sentences of these pages. The same seed draws the same ones."""
    found = [
        sentence
        for page in pages
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if len(words(sentence)) >= 6
    ]
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    for sentence in random.Random(number).sample(found, min(count, len(found))):
        print(sentence)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages [default: all user pages]")
    parser.add_argument("--draw", type=int, metavar="COUNT", help="print COUNT random sentences")
    parser.add_argument("--seed", default="", metavar="TEXT", help="seed of --draw")
    parser.add_argument("--from", dest="other", type=Path, metavar="DIR", help="pages below DIR")
    options = parser.parse_args()
    pages = options.pages or user_pages()
    if options.other:
        pages = sorted(options.other.rglob("*.md"))
    if options.draw:
        draw(pages, options.draw, options.seed)
    else:
        show(pages, bool(options.pages))


if __name__ == "__main__":
    sys.exit(main())
