"""The result of a check."""

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct, frozen=True):
    """One checked item.

    level: `wrong` keeps servers from working, `warning` may. found: the state found, with values.
    advice: what to do; empty if the level is `ok`.
    """

    group: str
    name: str
    level: Level
    found: str
    advice: str = ""


def ok(group: str, name: str, found: str) -> Finding:
    return Finding(group, name, "ok", found)


def warning(group: str, name: str, found: str, advice: str) -> Finding:
    return Finding(group, name, "warning", found, advice)


def wrong(group: str, name: str, found: str, advice: str) -> Finding:
    return Finding(group, name, "wrong", found, advice)
