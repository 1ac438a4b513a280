"""Corruptions inside a rank process: transfers that succeed but bring wrong bytes."""

from dataclasses import replace

import numpy as np

HEAD_BYTES = 32  # of K per token, by `Fleet`'s defaults


class TransferCorruptions:
    """Corrupts each request of a rank in the way that `what` names; an empty `what` corrupts none.

    On prefill, in the transfer plan:

        pages         each page goes to the next page's place
        another       the first page comes from another request
        layers        the first and the second buffer's pages are swapped
        heads         each group's first copy starts one head late in its source
        last token    the last page lacks its last token's last head

    On prefill, in what it packs, if it packs anything:

        not packed    the packing buffer keeps what was in it
        other tokens  each token's place gets the token before

    On prefill, in the digests: `no digests` cannot be computed, `junk digests` cannot be parsed.

    On decode: `byte` changes one byte in the last buffer's first page after the transfer; and in
    what it interleaves, if it interleaves anything:

        not interleaved      the rows stay as they came
        interleaved twice    they are taken for parts again
        parts swapped        each row's parts are in another order
    """

    def __init__(self, manager):
        # Stock has none of these.
        from sglang.srt.disaggregation.kv_layout import PackedPlan
        from sglang.srt.disaggregation.pd import interleaving, packing

        self.what = ""
        self._manager = manager
        self._pack, packing.pack = packing.pack, self._pack_wrongly
        self._interleave, interleaving.interleave = (
            interleaving.interleave,
            self._interleave_wrongly,
        )
        verifier = manager.kv_args.verifier
        self._digests, verifier.digests = verifier.digests, self._corrupt_digests
        self._kv_digests, verifier.kv.digests = verifier.kv.digests, self._corrupt_kv_digests
        self._compare, verifier.compare = verifier.compare, self._flip_byte
        self._verifier = verifier
        if hasattr(manager, "transfer_infos"):
            for info in manager.decode_kv_args_table.values():
                if not isinstance(info.plan.kv, PackedPlan):
                    info.plan = replace(info.plan, kv=_CorruptedPlan(info.plan.kv, self))
        if hasattr(manager, "prepared"):
            for peer, known in manager.prepared.items():
                if known is not None:
                    prepared, *lists = known
                    manager.prepared[peer] = (_CorruptedPreparedPlan(prepared, self), *lists)
            self._write, manager.write_pages = manager.write_pages, self._write_blocks

    def _corrupt_digests(self, *args) -> bytes:
        return b"junk!" if self.what == "junk digests" else self._digests(*args)

    def _corrupt_kv_digests(self, *args):
        if self.what == "no digests":
            raise RuntimeError(self.what)
        return self._kv_digests(*args)

    def _flip_byte(self, room, frames, pages, *rest):
        if self.what == "byte":
            self._verifier.kv.pages[-1][int(pages[0]), 0] += 1
        return self._compare(room, frames, pages, *rest)

    def _pack_wrongly(self, one, *rest) -> None:
        if self.what == "other tokens":
            one = replace(one, slots=np.roll(one.slots, 1))
        if self.what != "not packed":
            self._pack(one, *rest)

    def _interleave_wrongly(self, rows, slots, one) -> None:
        if self.what != "not interleaved":
            self._interleave(rows, slots, one)
        if self.what == "interleaved twice":
            self._interleave(rows, slots, one)
        if self.what == "parts swapped":
            rows[slots] = rows[slots].roll(one.widths[0], dims=1)

    def _write_blocks(self, peer, what, src_pages, dst_pages):
        """Writes blocks; posts copies of parts of pages one by one, as blocks are whole pages."""
        if what == "kv" and self.what in ("heads", "last token"):
            plan = self._manager.plan_for(peer)
            copies = plan.kv.copies(src_pages, dst_pages)
            return self._manager._post_copies(peer, plan, copies)
        return self._write(peer, what, src_pages, dst_pages)

    def pages(self, src_pages, dst_pages):
        """Returns a request's source and destination pages, corrupted if `what` says so."""
        src, dst = np.array(src_pages), np.array(dst_pages)
        if self.what == "pages":
            dst = np.roll(dst, 1)
        if self.what == "another":
            src[0] = next(page for page in range(12) if page not in src)
        return src, dst


class _Corrupted:
    """A transfer plan whose results are corrupted."""

    def __init__(self, plan, corruptions: TransferCorruptions):
        self._plan, self._corruptions = plan, corruptions

    def __getattr__(self, name):
        return getattr(self._plan, name)


class _CorruptedPlan(_Corrupted):
    """A corrupted `TransferPlan`."""

    def copies(self, src_pages, dst_pages):
        copies = self._plan.copies(*self._corruptions.pages(src_pages, dst_pages))
        change = {"layers": _swapped, "heads": _shifted, "last token": _shortened}
        if self._corruptions.what not in change:
            return copies
        return replace(copies, groups=tuple(map(change[self._corruptions.what], copies.groups)))


class _CorruptedPreparedPlan(_Corrupted):
    """A corrupted `PreparedPlan`, which has whole blocks only."""

    def blocks(self, src_pages, dst_pages):
        src, dst = self._plan.blocks(*self._corruptions.pages(src_pages, dst_pages))
        if self._corruptions.what == "layers":
            runs = dst.reshape(len(self._plan.dst), -1)
            runs[:2] = runs[:2][::-1].copy()
        return src, dst


def _swapped(some):
    dst = some.dst.copy()
    dst[:2] = dst[:2][::-1]
    return replace(some, dst=dst)


def _shifted(some):
    """Shifts only the first copy's source, so that all copies still read within their buffers."""
    offset = some.src_offset.copy()
    offset[0] += HEAD_BYTES
    return replace(some, src_offset=offset)


def _shortened(some):
    length = some.length.copy()
    length[-1] -= HEAD_BYTES
    return replace(some, length=length)
