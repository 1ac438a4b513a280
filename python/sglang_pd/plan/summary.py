"""A pair in figures: what its ranks hold, what a request takes, and the engines' verdicts."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_pd.patchset.patches import public_version, supported_releases, unsupported
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.links import PACKED, SLICED, TOKENS, WHOLE, Link, links
from sglang_pd.plan.model import read_model
from sglang_pd.plan.pair import ServerPair, make_pair
from sglang_pd.plan.sizes import parse_sizes
from sglang_pd.plan.verdict import Verdict, patched, stock


@dataclass(frozen=True)
class Summary:
    """All results for a pair; `links` is empty if the patched engine cannot serve it."""

    pair: ServerPair

    @cached_property
    def stock(self) -> Verdict:
        return stock(self.pair)

    @cached_property
    def patched(self) -> Verdict:
        return patched(self.pair)

    @property
    def works(self) -> bool:
        """Whether the pair is known to work on the patched engine."""
        return self.patched.outcome == "right"

    @cached_property
    def links(self) -> list[Link]:
        try:
            return links(self.pair) if self.patched.outcome in ("right", "unknown") else []
        except kv_layout.LayoutError:
            return []

    def rank_bytes(self, side: str) -> tuple[int, int]:
        """Returns the fullest rank's bytes per token (KV and state), and bytes per request."""
        most = (0, 0)
        for stage in range(self.pair.sides[side].pp):
            try:
                rank = self.pair.layout(side, 0, stage)
            except kv_layout.LayoutError:
                return most
            paged = [one for one in (*rank.kv, *rank.state) if one.component[:5] != "mamba"]
            token = sum(one.page_bytes for one in paged) // rank.page_size
            most = max(most, (token, self.pair.slot_bytes(side, stage)))
        return most

    @property
    def totals(self) -> dict[str, int]:
        """Totals for one request of `TOKENS` tokens."""
        return {
            "tokens": TOKENS,
            "links": sum(1 for link in self.links if link.parts),
            "bytes": sum(link.bytes for link in self.links),
            "copies_at_least": sum(link.min_copies for link in self.links),
            "copies_at_most": sum(link.max_copies for link in self.links),
            "copies_if_sliced": sum(link.sliced_copies for link in self.links),
            "messages": sum(link.messages for link in self.links),
        }

    @property
    def kv_heads(self) -> str:
        """How KV heads go between the patched servers' ranks: the worst of all links."""
        sent = {link.kv_heads for link in self.links}
        return next((one for one in (SLICED, PACKED) if one in sent), WHOLE)

    @property
    def packed_by(self) -> str | None:
        """The side that moves packed heads: decode interleaves rows, or prefill packs them."""
        if self.kv_heads != PACKED:
            return None
        prefill, decode = self.pair.tp
        return "decode" if prefill > decode else "prefill"

    @property
    def notes(self) -> list[str]:
        """Notes on what the figures leave out."""
        notes = []
        if self.pair.splits_recurrent_state and not self.pair.sends_state_by_plan:
            notes.append(
                "Between these sizes the engine itself sends recurrent state; it is not counted."
            )
        if any(side.dp > 1 for side in self.pair.sides.values()):
            notes.append("A request goes from one group of prefill to one group of decode.")
        return notes


def summarize(
    path: Path,
    pairs: list[tuple[str, str]],
    backend: str,
    release: str,
    page: int,
    draft: int,
    fia: bool,
) -> list[Summary]:
    """Summarizes pairs of sizes (prefill's, decode's) for the model whose config.json is at `path`.

    `sglang-pd plan --help` describes the other options. Raises Refusal UNSUPPORTED for an unknown
    release, else as `read_model`; ValueError if no server starts with the sizes.
    """
    engine, found = public_version(release), []
    if engine not in supported_releases():
        raise unsupported(f"SGLang {release}", ": pass one of these as --release")
    model = read_model(path, engine)
    for both in pairs:
        sides = [parse_sizes(text, draft, page) for text in both]
        found.append(Summary(make_pair(model, *sides, backend, engine, fia)))
    return found
