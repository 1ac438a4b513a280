"""A pair drawn: prefill's ranks at the left, decode's at the right, layers and heads as a grid.

    prefill   TP 0   TP 1        decode   TP 0
    layer 0  |P0.0| |P1.0|               |P0.0|P1.0|    what comes from prefill's TP rank 1,
          1  |P0.1| |P1.1|               |P0.1|P1.1|    stage 1, is named P1.1 on both sides

Names say it all; colours (of TP ranks) and hatches (of stages) only help.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pd.errors import Code, Refusal
from sglang_pd.topology.core import kv_layout
from sglang_pd.topology.hybrids import FULL, RECURRENT, WINDOW
from sglang_pd.topology.links import Link, Rank
from sglang_pd.topology.show import spans, title, totals
from sglang_pd.topology.summary import Summary
from sglang_pd.topology.verdict import Verdict

FORMATS = (".svg", ".png")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")
FACES = {FULL: ("white", ""), WINDOW: ("0.6", ""), RECURRENT: ("white", "xxxx")}
KINDS = {FULL: "full attention", WINDOW: "sliding window", RECURRENT: "recurrent state"}
# Inches.
NARROW, WIDE, LEAST_SIDE = 0.32, 0.62, 2.4
MARGIN, BETWEEN, LINE = 0.7, 0.9, 0.17
TALLEST, A_LAYER, FOOT = 8.5, 0.13, 0.95
FONT = 7.5


def check_name(path: Path) -> None:
    """Raises ValueError for a file of another kind, Refusal NO_PICTURE where nothing can draw."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--picture {path}: a picture is a file {' or '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Refusal(
            Code.NO_PICTURE, f"{error}; drawing needs pip install 'sglang-pd[picture]'"
        ) from error


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write a picture of pairs, one below the other. Raises as `check_name`, and OSError."""
    check_name(path)
    import matplotlib
    from matplotlib.figure import Figure

    panels = [Panel(summary) for summary in summaries]
    width = max(panel.width for panel in panels)
    height = sum(panel.height(width) for panel in panels)
    with matplotlib.rc_context({"svg.hashsalt": "sglang-pd", "hatch.linewidth": 0.4}):
        figure = Figure(figsize=(width, height))
        top = height
        for panel in panels:
            panel.draw(figure, top, width, height)
            top -= panel.height(width)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


@dataclass
class Column:
    """A rank of a group and all its stages: where it is drawn, and which heads it holds."""

    tp: int
    at: float
    heads: range


class Panel:
    """The picture of one pair. Distances are in inches until they are drawn."""

    def __init__(self, summary: Summary):
        self.summary, self.pair = summary, summary.pair
        sides = self.pair.sides.values()
        self.total = self.pair.model.layers
        self.rows = self.total + max(side.draft for side in sides)
        self.inner = min(TALLEST, max(3.0, self.rows * A_LAYER))
        shortest = min(len(stage) for side in self.pair.stages for stage in side)
        is_low = shortest / self.rows * self.inner < 0.5
        self.tiles = {"prefill": 1, "decode": self._cuts()}
        many = max(self.tiles[name] * side.tp for name, side in self.pair.sides.items()) > 8
        self.is_upright = many and not is_low
        self.tile = NARROW if self.is_upright else WIDE

    def _cuts(self) -> int:
        """Pieces that a decode rank's heads are sent in."""
        pieces: dict[Rank, set] = {}
        for link in self.summary.links:
            if link.shares:
                pieces.setdefault(link.decode, set()).add(link.prefill.tp)
        return max(map(len, pieces.values()), default=1)

    def side_width(self, name: str) -> float:
        side = self.pair.sides[name]
        gaps = (side.dp - 1) * self.tile / 2
        return max(LEAST_SIDE, self.tiles[name] * side.tp * self.tile + gaps)

    @property
    def width(self) -> float:
        sides = sum(map(self.side_width, self.pair.sides))
        return max(8.0, 2 * MARGIN + BETWEEN + sides)

    def head(self, width: float) -> list[str]:
        """The lines above the picture."""
        pair = self.pair
        pages = " and ".join(dict.fromkeys(str(side.page) for side in pair.sides.values()))
        lines = [
            f"{pair.model.name}: {pair.model.title}",
            f"{title(pair)}, {pair.backend}, page size {pages}, SGLang {pair.release}",
            _verdict("stock", self.summary.stock),
            _verdict("patched", self.summary.patched),
        ]
        return [part for line in lines for part in _wrapped(line, width)]

    def foot(self, width: float) -> list[str]:
        """The lines below it."""
        known = "Px.y is prefill's attention TP rank x, stage y; at decode, what comes from it."
        if any(not link.shares for link in self.summary.links):
            known += " Dashed: asked, and another rank sends."
        lines = [known, *totals(self.summary), *self.summary.notes]
        return [part for line in lines for part in _wrapped(line, width)]

    def height(self, width: float) -> float:
        lines = len(self.head(width)) + len(self.foot(width))
        return lines * LINE + self.inner + FOOT + 1.0

    def draw(self, figure: Any, top: float, width: float, height: float) -> None:
        """Into a figure of this size, from `top` downwards."""
        y = top - 0.2
        for number, line in enumerate(self.head(width)):
            weight = "bold" if number == 0 else "normal"
            figure.text(0.2 / width, y / height, line, fontsize=9, weight=weight, va="top")
            y -= LINE
        bottom = y - 0.5 - self.inner
        spare = width - self.width
        left = MARGIN
        for name in self.pair.sides:
            wide = self.side_width(name) + spare / 2
            box = [left / width, bottom / height, wide / width, self.inner / height]
            self._side(figure.add_axes(box), name, wide)
            left += wide + BETWEEN
        y = bottom - FOOT + 0.25
        for line in self.foot(width):
            figure.text(0.2 / width, y / height, line, fontsize=8, va="top")
            y -= LINE

    def _side(self, axes: Any, name: str, wide: float) -> None:
        side = self.pair.sides[name]
        columns = self._columns(name)
        each = self.tiles[name]
        drafts = side.draft
        axes.set_xlim(-0.1 * each, columns[-1].at + each + 0.1 * each)
        axes.set_ylim(self.rows + 0.1, -0.1)
        for column in columns:
            for stage, layers in enumerate(self.pair.stages[name == "decode"]):
                self._rank(axes, name, column, stage, layers)
            if drafts:
                _box(axes, column.at, self.total, 0.94 * each, drafts, "white", linestyle="-")
        for link in self._drawn(name):
            for column in columns:
                if column.tp == getattr(link, name).tp:
                    self._tiles(axes, name, column, link)
        self._axes(axes, name, columns, wide)

    def _drawn(self, name: str) -> list[Link]:
        """At decode all links, at prefill one of each rank that sends."""
        links = [link for link in self.summary.links if link.shares]
        return links if name == "decode" else list({one.prefill: one for one in links}.values())

    def _columns(self, name: str) -> list[Column]:
        side, each, total = self.pair.sides[name], self.tiles[name], self.pair.model.kv_heads
        columns = []
        for group in range(side.dp):
            for tp in range(side.attention_tp):
                at = (group * side.attention_tp + tp) * each + group * 0.5
                columns.append(Column(tp, at, _held(tp, side.attention_tp, total)))
        return columns

    def _rank(self, axes: Any, name: str, column: Column, stage: int, layers: range) -> None:
        """The frame of a rank, and its grid of layers and heads."""
        wide = 0.94 * self.tiles[name]
        links = [one for one in self.summary.links if getattr(one, name) == (column.tp, stage)]
        is_idle = name == "prefill" and links and not any(one.shares for one in links)
        height = len(layers)
        style = "--" if is_idle else "-"
        _box(axes, column.at, layers.start, wide, height, "white", linestyle=style)
        for layer in layers[1:]:
            axes.plot([column.at, column.at + wide], [layer, layer], color="0.8", lw=0.3, zorder=3)
        for number in range(1, len(column.heads)):
            x = column.at + wide * number / len(column.heads)
            ends = [layers.start, layers.stop]
            axes.plot([x, x], ends, color="0.8", lw=0.3, zorder=3)
        if is_idle or name == "prefill" and not links:
            self._label(axes, column.at + wide / 2, layers.start + height / 2, (column.tp, stage))

    def _tiles(self, axes: Any, name: str, column: Column, link: Link) -> None:
        """What a link carries, where it lies in a rank."""
        wide = 0.94 * self.tiles[name]
        for is_draft in (False, True):
            shares = [one for one in link.shares if one.draft is is_draft]
            if not shares:
                continue
            first = (self.total if is_draft else 0) + min(one.layer for one in shares)
            end = (self.total if is_draft else 0) + max(one.layer for one in shares) + 1
            if not is_draft:  # layers of a stage that keep nothing are inside of it
                layers = self.pair.stages[0][link.prefill.pp]
                first, end = layers.start, layers.stop
            x, part = column.at, wide
            if name == "decode" and shares[0].heads and len(column.heads):
                start, stop = shares[0].heads
                x += wide * (start - column.heads.start) / len(column.heads)
                part = wide * (stop - start) / len(column.heads)
            face = _colour(link.prefill.tp)
            hatch = HATCHES[link.prefill.pp % len(HATCHES)]
            _box(axes, x, first, part, end - first, face, hatch=hatch, linestyle="-")
            if not is_draft:
                self._label(axes, x + part / 2, (first + end) / 2, link.prefill)

    def _label(self, axes: Any, x: float, y: float, rank: tuple[int, int]) -> None:
        around = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
        axes.text(
            x,
            y,
            f"P{rank[0]}.{rank[1]}",
            ha="center",
            va="center",
            fontsize=FONT,
            rotation=90 if self.is_upright else 0,
            bbox=around,
            zorder=5,
        )

    def _axes(self, axes: Any, name: str, columns: list[Column], wide: float) -> None:
        side, each = self.pair.sides[name], self.tiles[name]
        total = self.pair.model.kv_heads
        step = next(one for one in (1, 2, 4, 8, 16, 32, 64) if self.total / one * 0.16 < self.inner)
        marks = list(range(0, self.total, step))
        names = [str(layer) for layer in marks]
        if self.rows > self.total:
            marks = [mark for mark in marks if self.total - mark >= step / 2]
            names = [*map(str, marks), "draft"]
            marks.append(self.total + (self.rows - self.total - 1) / 2)
        axes.set_yticks([mark + 0.5 for mark in marks], names, fontsize=FONT)
        heads = ["" if total is None else f"\nheads {spans(list(one.heads))}" for one in columns]
        labels = [f"TP {one.tp}{held}" for one, held in zip(columns, heads, strict=True)]
        turned = {"rotation": 90} if wide / len(columns) < 0.6 else {}
        centres = [one.at + 0.47 * each for one in columns]
        axes.set_xticks(centres, labels, fontsize=FONT, **turned)
        for group in range(side.dp if side.dp > 1 else 0):
            first = columns[group * side.attention_tp]
            x = first.at + side.attention_tp * each / 2
            axes.text(x, -0.01 * self.rows, f"group {group}", ha="center", va="bottom", fontsize=8)
        parts = f"{name}: {side}"
        axes.set_title(parts, fontsize=9, pad=22 if side.dp > 1 else 6)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if name == "prefill" and len(set(self.pair.model.kinds)) > 1:
            self._kinds(axes, wide)

    def _kinds(self, axes: Any, wide: float) -> None:
        """A strip between the two sides that says of which kind each layer is."""
        left, right = axes.get_xlim()
        unit = (right - left) / wide
        x = right + 0.1 * unit
        for layer, kinds in enumerate(self.pair.model.kinds):
            for number, kind in enumerate(sorted(kinds)):
                part = 0.16 / len(kinds) * unit
                face, hatch = FACES[kind]
                at = x + number * part
                _box(axes, at, layer, part, 1, face, hatch=hatch, linestyle="-", clip_on=False)
        if axes.figure.legends:
            return
        used = [kind for kind in KINDS if any(kind in one for one in self.pair.model.kinds)]
        handles = [_box(None, 0, 0, 1, 1, FACES[one][0], hatch=FACES[one][1]) for one in used]
        names = [KINDS[one] for one in used]
        axes.figure.legend(handles, names, loc="upper right", fontsize=FONT, frameon=False)


def _box(axes: Any, x: float, y: float, wide: float, high: float, face: Any, **more) -> Any:
    from matplotlib.patches import Rectangle

    box = Rectangle((x, y), wide, high, facecolor=face, edgecolor="black", lw=0.6, **more)
    if axes is not None:
        axes.add_patch(box)
    return box


def _held(tp: int, size: int, total: int | None) -> range:
    """Heads of a rank; none where they cannot be dealt out."""
    try:
        heads = kv_layout.heads_of_rank(tp, size, total) if total else None
    except kv_layout.LayoutError:
        heads = None
    return range(0) if heads is None else range(heads.start, heads.stop)


def _colour(tp: int) -> tuple:
    """Light ones, of which neighbours differ; without colours they are greys."""
    from matplotlib import colormaps

    return tuple(0.45 + 0.55 * part for part in colormaps["tab20"](tp % 20)[:3])


def _verdict(name: str, verdict: Verdict) -> str:
    return f"{name}: {verdict.outcome}" + "".join(f"; {reason}" for reason in verdict.reasons)


def _wrapped(line: str, width: float) -> list[str]:
    return textwrap.wrap(line, int(width * 13.5))
