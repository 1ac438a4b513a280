"""Mistakes inside a rank process: transfers that succeed and bring what they should not."""

from dataclasses import replace

import numpy as np

HEAD_BYTES = 32  # of `Fleet`, by default


class Mistakes:
    """From now on `what` goes wrong with each request of a rank; nothing with an empty one.

    On prefill, in the plan of its copies:

        pages         each page goes where the next one should
        another       the first page comes from another request
        layers        the first buffer's pages go to the second, and the other way round
        heads         from each buffer the bytes of one head further on
        last token    the last page comes without its last token's last head

    With `no digests` they cannot be computed, with `junk digests` they cannot be read.

    On decode: `byte`, one byte of the first page of the last buffer changes after it has arrived.
    """

    def __init__(self, manager):
        self.what = ""
        self._manager = manager
        if hasattr(manager, "transfer_infos"):
            manager._plan_transfers = self._planned(manager._plan_transfers)
            self._room_digests, manager.room_digests = manager.room_digests, self._digests
            self._kv_digests = manager.verifier.kv.digests
            manager.verifier.kv.digests = self._kv
            for info in manager.decode_kv_args_table.values():
                info.plan = replace(info.plan, kv=_Plan(info.plan.kv, self))
        else:
            self._verify = manager.verify
            manager.verify = self._flip

    def _planned(self, plan_transfers):
        def planned(info):
            plan_transfers(info)
            info.plan = replace(info.plan, kv=_Plan(info.plan.kv, self))

        return planned

    def _digests(self, *args) -> bytes:
        return b"junk!" if self.what == "junk digests" else self._room_digests(*args)

    def _kv(self, *args):
        if self.what == "no digests":
            raise RuntimeError(self.what)
        return self._kv_digests(*args)

    def _flip(self, room, address, pages, *rest):
        if self.what == "byte":
            self._manager.verifier.kv.pages[-1][int(pages[0]), 0] += 1
        return self._verify(room, address, pages, *rest)


class _Plan:
    """A `TransferPlan` with a mistake in what it gives."""

    def __init__(self, plan, mistakes: Mistakes):
        self._plan, self._mistakes = plan, mistakes

    def __getattr__(self, name):
        return getattr(self._plan, name)

    def copies(self, src_pages, dst_pages):
        src, dst, what = np.array(src_pages), np.array(dst_pages), self._mistakes.what
        if what == "pages":
            dst = np.roll(dst, 1)
        if what == "another":
            src[0] = next(page for page in range(12) if page not in src)
        copies = self._plan.copies(src, dst)
        if what == "layers":
            return replace(copies, sets=tuple(map(_swapped, copies.sets)))
        if what == "heads":
            return replace(copies, sets=tuple(map(_shifted, copies.sets)))
        if what == "last token":
            return replace(copies, sets=tuple(map(_shortened, copies.sets)))
        return copies


def _swapped(some):
    dst = some.dst.copy()
    dst[:2] = dst[:2][::-1]
    return replace(some, dst=dst)


def _shifted(some):
    """Of the first copy, so that it still reads within its buffer."""
    offset = some.src_offset.copy()
    offset[0] += HEAD_BYTES
    return replace(some, src_offset=offset)


def _shortened(some):
    length = some.length.copy()
    length[-1] -= HEAD_BYTES
    return replace(some, length=length)
