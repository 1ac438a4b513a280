"""Finds the commands in the docs."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
DOCKERFILES = sorted((ROOT / "docs" / "docker").iterdir())

FENCE = re.compile(r"(?ms)^ *```(?P<about>[^\n]*)\n(?P<text>.*?)^ *```$")
EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: Path of the page, relative to the repository.
        words: The command without variables before it and without redirections.
        code: The exit code in the comment behind the command; 0 without one.
        release: The only engine release that the command is for, or empty.
    """

    page: str
    words: tuple[str, ...]
    code: int
    release: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands(*program: str) -> list[Command]:
    """Returns the commands in all pages and Dockerfiles that start with these words."""
    found = [one for page in PAGES for one in page_commands(page)]
    found += [one for file in DOCKERFILES for one in dockerfile_commands(file)]
    return [one for one in found if one.words[: len(program)] == program]


def page_commands(page: Path) -> list[Command]:
    """Returns the commands in a page's shell blocks and in its blocks without a language."""
    found = []
    for block in FENCE.finditer(page.read_text()):
        language, _, release = block["about"].partition(" ")
        if language in ("", "sh"):
            found += _commands(page, block["text"], release)
    return found


def dockerfile_commands(file: Path) -> list[Command]:
    text = "\n".join(re.findall(r"(?m)^RUN (.*)$", file.read_text()))
    return _commands(file, text, "")


def _commands(page: Path, text: str, release: str) -> list[Command]:
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        code = EXIT_CODE.search(line)
        for part in re.split(r"&&|\|", line.split(" #")[0].strip()):
            words = _shell_words(part)
            if words:
                name = str(page.relative_to(ROOT))
                found.append(Command(name, words, int(code[1]) if code else 0, release))
    return found


def _shell_words(part: str) -> tuple[str, ...]:
    try:
        words = shlex.split(part)
    except ValueError:
        return ()  # prose, or a program's output
    while words and re.match(r"[A-Z_0-9]+=", words[0]):
        del words[0]
    ends = [i for i, word in enumerate(words) if word in (">", "&")]
    return tuple(words[: min(ends, default=len(words))])
