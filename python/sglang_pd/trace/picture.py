"""Draws one request's time: a row for each rank, a colour for each state."""

from pathlib import Path

from sglang_pd.plan.picture import RC_PARAMS, check_picture_path
from sglang_pd.trace.requests import SIDES, STATES, Request
from sglang_pd.trace.show import MARKS, sentence

COLOURS = {
    "bootstrapping": "#d9d9d9",
    "prefilling": "#9ecae1",
    "sending": "#08519c",
    "allocating": "#e8e0d0",
    "waiting": "#fdd0a2",
    "receiving": "#e6550d",
    "interleaving": "#7b3294",
    "queued": "#bdbdbd",
}
WIDTH, ROW, MARGIN = 9.0, 0.35, 1.8  # inches


def draw(request: Request, path: Path) -> None:
    """Draws a request into an SVG or PNG file.

    Raises:
        ValueError: Another type of file.
        Refusal: Matplotlib is not installed.
        OSError: The file cannot be written.
    """
    check_picture_path(path)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [f"{record.side} {record.rank}" for side in SIDES for record in request.ranks[side]]
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        used = []
        for side, rank, state, start, end in request.bars():
            row = rows.index(f"{side} {rank}")
            axes.barh(row, end - start, left=start, color=COLOURS[state], height=0.7)
            used.append((side, state))
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_title(f"room {request.room}: {sentence(request)}", fontsize=9, wrap=True)
        shown = [(side, one) for side in SIDES for one in STATES[side] if (side, one) in used]
        labels = [
            Patch(color=COLOURS[state], label=f"{side} {MARKS[state][1]}") for side, state in shown
        ]
        axes.legend(
            handles=labels, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=2
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
