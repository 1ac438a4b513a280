"""Draws a pair: prefill's ranks on the left, decode's on the right, layers and heads as a grid.

    prefill   TP 0   TP 1        decode   TP 0
    layer 0  |P0.0| |P1.0|               |P0.0|P1.0|    what prefill's TP rank 1, stage 1, sends
          1  |P0.1| |P1.1|               |P0.1|P1.1|    is labelled P1.1 on both sides

The labels suffice; colours (for TP ranks) and hatches (for stages) only help.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.plan.grid import ServerGrid
from sglang_pd.plan.show import title, totals
from sglang_pd.plan.summary import Summary
from sglang_pd.plan.verdict import Verdict

FORMATS = (".svg", ".png")
# Text in an SVG stays text; its ids are the same each time.
RC_PARAMS = {"svg.fonttype": "none", "svg.hashsalt": "sglang-pd", "hatch.linewidth": 0.4}
# In inches.
NARROW, WIDE, MIN_SIDE = 0.32, 0.62, 2.4
MARGIN, GAP, LINE = 0.7, 0.9, 0.17
MAX_HEIGHT, LAYER_HEIGHT, FOOT = 8.5, 0.13, 0.95


def check_picture_path(path: Path) -> None:
    """Raises ValueError for another file type, Refusal NO_PICTURE without Matplotlib."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--picture {path}: the file must be {' or '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Refusal(
            ExitCode.NO_PICTURE, f"{error}; to draw, run pip install 'sglang-pd[picture]'"
        ) from error


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draws the pairs, one below the other. Raises as `check_picture_path`, and OSError."""
    check_picture_path(path)
    import matplotlib
    from matplotlib.figure import Figure

    panels = [Panel(summary) for summary in summaries]
    width = max(panel.width for panel in panels)
    height = sum(panel.height(width) for panel in panels)
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(width, height))
        top = height
        for panel in panels:
            panel.draw(figure, top, width, height)
            top -= panel.height(width)
        if path.suffix == ".svg":
            text = StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            path.write_text(_compact(text.getvalue()), encoding="utf-8")
        else:
            figure.savefig(path, dpi=110)


class Panel:
    """The picture of one pair, with text above and below. Distances are in inches."""

    def __init__(self, summary: Summary):
        self.summary, self.pair = summary, summary.pair
        sides = self.pair.sides.values()
        self.rows = self.pair.model.layers + max(side.draft for side in sides)
        self.inner = min(MAX_HEIGHT, max(3.0, self.rows * LAYER_HEIGHT))
        shortest = min(len(stage) for side in self.pair.stages for stage in side)
        is_low = shortest / self.rows * self.inner < 0.5
        # In how many pieces a rank's heads arrive, at most.
        senders = {(one.decode, one.prefill.tp) for one in summary.links if one.parts}
        decode_pieces = max(Counter(decode for decode, _ in senders).values(), default=1)
        self.pieces = {"prefill": 1, "decode": decode_pieces}
        many = max(self.pieces[name] * side.tp for name, side in self.pair.sides.items()) > 8
        self.is_upright = many and not is_low
        self.piece = NARROW if self.is_upright else WIDE

    def side_width(self, name: str) -> float:
        side = self.pair.sides[name]
        gaps = (side.dp - 1) * self.piece / 2
        return max(MIN_SIDE, self.pieces[name] * side.tp * self.piece + gaps)

    @property
    def width(self) -> float:
        sides = sum(map(self.side_width, self.pair.sides))
        return max(8.0, 2 * MARGIN + GAP + sides)

    def head(self, width: float) -> list[str]:
        """Returns the lines above the picture."""
        pair = self.pair
        lines = [
            f"{pair.model.name}: {pair.model.title}",
            f"{title(pair)}, {pair.backend}, page size {pair.pages}, SGLang {pair.release}",
            _verdict("stock", self.summary.stock),
            _verdict("patched", self.summary.patched),
        ]
        return _wrapped(lines, width)

    def foot(self, width: float) -> list[str]:
        """Returns the lines below the picture."""
        known = "Px.y is prefill's attention TP rank x, stage y; on decode, what that rank sends."
        if any(not link.parts for link in self.summary.links):
            known += " Dashed: receives the request, but another rank sends."
        lines = [known, *totals(self.summary), *self.summary.notes]
        return _wrapped(lines, width)

    def height(self, width: float) -> float:
        lines = len(self.head(width)) + len(self.foot(width))
        return lines * LINE + self.inner + FOOT + 1.0

    def draw(self, figure: Any, top: float, width: float, height: float) -> None:
        """Draws into a figure of this width and height, from `top` downwards."""
        y = top - 0.2
        for number, line in enumerate(self.head(width)):
            weight = "bold" if number == 0 else "normal"
            figure.text(0.2 / width, y / height, line, fontsize=9, weight=weight, va="top")
            y -= LINE
        bottom = y - 0.5 - self.inner
        spare = width - self.width
        left = MARGIN
        for name in self.pair.sides:
            side_width = self.side_width(name) + spare / 2
            box = [left / width, bottom / height, side_width / width, self.inner / height]
            axes = figure.add_axes(box)
            grid = ServerGrid(self.summary, name, axes, self.pieces[name], self.is_upright)
            grid.draw(self.rows, (side_width, self.inner))
            if name == "prefill" and len(set(self.pair.model.kinds)) > 1:
                grid.label_layer_kinds(side_width)
            left += side_width + GAP
        y = bottom - FOOT + 0.25
        for line in self.foot(width):
            figure.text(0.2 / width, y / height, line, fontsize=8, va="top")
            y -= LINE


def _verdict(name: str, verdict: Verdict) -> str:
    return f"{name}: {verdict.outcome}" + "".join(f"; {reason}" for reason in verdict.reasons)


def _compact(svg: str) -> str:
    """Returns the picture with a line per shape or text; Matplotlib writes a line per point."""
    svg = re.sub(r' d="[^"]*"', lambda path: path[0].replace("\n", ""), svg)
    return re.sub(r">\n\s*(?=<(?:/g|text|path|use)\b)", ">", svg)


def _wrapped(lines: list[str], width: float) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, int(width * 13.5))]
