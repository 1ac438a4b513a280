"""Draws one server: a column for each rank, layers from the top, KV heads from the left."""

from dataclasses import dataclass
from typing import Any

from sglang_pd.plan.hybrids import FULL, RECURRENT, WINDOW
from sglang_pd.plan.links import Link, RankId
from sglang_pd.plan.show import format_spans
from sglang_pd.plan.summary import Summary

FONT = 7.5
FILL_FACTOR = 0.94  # of a column's width; the rest is the gap to the next one
GROUP_GAP = 0.5  # pieces of a rank's heads
UPRIGHT_BELOW = 0.6  # column width in inches below which its name is written vertically
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---")
LABEL_STEPS = (1, 2, 4, 8, 16, 32, 64)  # layers per label
MAX_ROW_LABELS = 16
KIND_STYLES = {
    FULL: ("full attention", "white", ""),
    WINDOW: ("sliding window", "0.6", ""),
    RECURRENT: ("recurrent state", "white", "xxxx"),
}


@dataclass(frozen=True)
class Column:
    """A TP rank of a group in all stages: its position, and the heads that it holds."""

    tp: int
    at: float
    heads: range


class ServerGrid:
    """One server of a pair on its axes, whose units are layers and pieces of a rank's heads."""

    def __init__(self, summary: Summary, name: str, axes: Any, pieces: int, is_upright: bool):
        """pieces: in which a rank's heads arrive. is_upright: whether rank labels are vertical."""
        self.pair, self.name, self.axes = summary.pair, name, axes
        self.links, self.pieces, self.is_upright = summary.links, pieces, is_upright
        self.sizes = self.pair.sides[name]
        self.stages = self.pair.stages_of(name)
        self.layers = self.pair.model.layers
        self.width = FILL_FACTOR * pieces
        self.columns = []
        for number in range(self.sizes.dp * self.sizes.attention_tp):
            group, tp = divmod(number, self.sizes.attention_tp)
            heads = self.pair.heads_of_rank(tp, self.sizes.attention_tp)
            self.columns.append(Column(tp, number * pieces + group * GROUP_GAP, heads))

    def draw(self, rows: int, inches: tuple[float, float]) -> None:
        """Draws the server. rows: layers, with the draft's. inches: the axes' width and height."""
        margin = 0.1 * self.pieces
        self.axes.set_xlim(-margin, self.columns[-1].at + self.pieces + margin)
        self.axes.set_ylim(rows + 0.1, -0.1)
        for column in self.columns:
            for stage, layers in enumerate(self.stages):
                self._draw_rank(column, RankId(column.tp, stage), layers)
            if self.sizes.draft:
                self._draw_box(column.at, self.layers, self.width, self.sizes.draft, "white")
            for link in self._links_to_draw():
                if column.tp == getattr(link, self.name).tp:
                    self._draw_link(column, link)
        self._label_rows(rows, inches[1])
        self._label_columns(inches[0])

    def _links_to_draw(self) -> list[Link]:
        """Returns all links that carry something for decode, one per sending rank for prefill."""
        links = [link for link in self.links if link.parts]
        if self.name == "decode":
            return links
        return list({link.prefill: link for link in links}.values())

    def _draw_rank(self, column: Column, rank: RankId, layers: range) -> None:
        """Draws a rank's frame, with lines between layers and between heads."""
        own = [link for link in self.links if getattr(link, self.name) == rank]
        sends = any(link.parts for link in own)
        style = "--" if own and not sends else "-"
        left, right = column.at, column.at + self.width
        self._draw_box(left, layers.start, self.width, len(layers), "white", linestyle=style)
        xs, ys = [], []
        for layer in layers[1:]:
            xs += [left, right, None]
            ys += [layer, layer, None]
        for number in range(1, len(column.heads)):
            xs += [left + self.width * number / len(column.heads)] * 2 + [None]
            ys += [layers.start, layers.stop, None]
        self.axes.plot(xs, ys, color="0.8", lw=0.3, zorder=3)
        if self.name == "prefill" and not sends:
            self._draw_label((left + right) / 2, (layers.start + layers.stop) / 2, rank)

    def _draw_link(self, column: Column, link: Link) -> None:
        """Draws what a link carries, at its place in a rank: a stage's layers, and a draft's."""
        left, part = column.at, self.width
        heads = link.parts[0].heads
        if self.name == "decode" and heads and column.heads:
            each = self.width / len(column.heads)
            left += each * (heads[0] - column.heads.start)
            part = each * (heads[1] - heads[0])
        stage = self.pair.stages[0][link.prefill.pp]
        like = {"face": _colour(link.prefill.tp), "hatch": HATCHES[link.prefill.pp % len(HATCHES)]}
        self._draw_box(left, stage.start, part, len(stage), **like)
        self._draw_label(left + part / 2, (stage.start + stage.stop) / 2, link.prefill)
        drafts = {one.layer for one in link.parts if one.draft}
        if drafts:
            self._draw_box(left, self.layers, part, len(drafts), **like)

    def _draw_label(self, x: float, y: float, rank: RankId) -> None:
        around = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none", "alpha": 0.85}
        style = {"ha": "center", "va": "center", "fontsize": FONT, "bbox": around, "zorder": 5}
        rotation = 90 if self.is_upright else 0
        self.axes.text(x, y, f"P{rank.tp}.{rank.pp}", rotation=rotation, **style)

    def _label_rows(self, rows: int, height: float) -> None:
        labels = min(MAX_ROW_LABELS, height / 0.16)
        step = next((one for one in LABEL_STEPS if self.layers / one <= labels), LABEL_STEPS[-1])
        marks = list(range(0, self.layers, step))
        if rows > self.layers:
            marks = [mark for mark in marks if self.layers - mark >= step / 2]
        names = [str(mark) for mark in marks]
        if rows > self.layers:
            marks.append(self.layers + (rows - self.layers - 1) / 2)
            names.append("draft")
        self.axes.set_yticks([mark + 0.5 for mark in marks], names, fontsize=FONT)
        self.axes.set_ylabel("layer", fontsize=8)

    def _label_columns(self, width: float) -> None:
        names = [
            f"TP {one.tp}" + (f"\nheads {format_spans(list(one.heads))}" if one.heads else "")
            for one in self.columns
        ]
        rotation = 90 if width / len(self.columns) < UPRIGHT_BELOW else 0
        centres = [one.at + self.width / 2 for one in self.columns]
        self.axes.set_xticks(centres, names, fontsize=FONT, rotation=rotation)
        of_group = self.sizes.attention_tp
        for group in range(self.sizes.dp if self.sizes.dp > 1 else 0):
            at = sum(centres[group * of_group : (group + 1) * of_group]) / of_group
            above = {"textcoords": "offset points", "xytext": (0, 3), "ha": "center"}
            self.axes.annotate(f"group {group}", (at, 0), fontsize=8, va="bottom", **above)
        pad = 22 if self.sizes.dp > 1 else 6
        self.axes.set_title(f"{self.name}: {self.sizes}", fontsize=9, pad=pad)
        self.axes.tick_params(left=False, bottom=False)
        for spine in self.axes.spines.values():
            spine.set_visible(False)

    def label_layer_kinds(self, width: float) -> None:
        """Draws a strip of the layers' kinds right of the axes, which are `width` inches wide."""
        left, right = self.axes.get_xlim()
        inch = (right - left) / width
        for layer, kinds in enumerate(self.pair.model.kinds):
            part = 0.16 * inch / max(1, len(kinds))
            for number, kind in enumerate(sorted(kinds)):
                _, face, hatch = KIND_STYLES[kind]
                at = right + 0.1 * inch + number * part
                self._draw_box(at, layer, part, 1, face, hatch=hatch, clip_on=False)
        if self.axes.figure.legends:
            return
        kinds = set().union(*self.pair.model.kinds)
        styles = [style for kind, style in KIND_STYLES.items() if kind in kinds]
        boxes = [_rectangle(0, 0, 1, 1, face, hatch=hatch) for _, face, hatch in styles]
        names = [name for name, _, _ in styles]
        self.axes.figure.legend(boxes, names, loc="upper right", fontsize=FONT, frameon=False)

    def _draw_box(self, x: float, y: float, width: float, height: float, face: Any, **more) -> None:
        self.axes.add_patch(_rectangle(x, y, width, height, face, **more))


def _rectangle(x: float, y: float, width: float, height: float, face: Any, **more) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=face, edgecolor="black", lw=0.6, **more)


def _colour(tp: int) -> tuple:
    """Returns a light colour; adjacent ranks have different ones."""
    from matplotlib import colormaps

    return tuple(0.45 + 0.55 * part for part in colormaps["tab20"](tp % 20)[:3])
