"""Wrong indices in the metadata that a Mooncake or Ascend prefill rank reads."""

from sglang.srt.disaggregation.mooncake import conn


class BadIndices:
    """Changes decode's metadata of each room by `what`, which is empty at first (no change).

    metadata    the slot behind the last one
    state       the slot of state behind the last one
    window      state without its first page
    """

    def __init__(self, manager):
        self.what = ""
        self._args = manager.kv_args
        self._read = conn.TransferInfo.from_zmq
        conn.TransferInfo.from_zmq = staticmethod(self._with_bad_indices)
        if hasattr(manager, "_read_room"):  # the manager has looked up `from_zmq` by now
            manager._read_room = self._with_bad_indices

    def _with_bad_indices(self, frames):
        info, args = self._read(frames), self._args
        if self.what == "metadata":
            info.dst_aux_index = args.aux_data_lens[0] // args.aux_item_lens[0]
        elif self.what == "state":
            of_kinds = isinstance(info.dst_state_indices[0], list)
            lens, items = args.state_data_lens, args.state_item_lens
            slot = lens[0][0] // items[0][0] if of_kinds else lens[0] // items[0]
            info.dst_state_indices = [[slot]] if of_kinds else [slot]
        elif self.what == "window":
            of_kinds = isinstance(info.dst_state_indices[0], list)
            lists = info.dst_state_indices if of_kinds else [info.dst_state_indices]
            shorter = [pages[1:] for pages in lists]
            info.dst_state_indices = shorter if of_kinds else shorter[0]
        return info
