"""A process with one end of a MemFabric connection; calls and results are JSON lines.

usage: memfabric_end.py prefill|decode DEVICE

A call is `[name, argument...]`, a method of `End` or else of MemFabric's transfer engine. Its
result is `[value, seconds]`; if it raises, the value is `{"raised": TEXT}`. Offsets count from the
start of the end's memory, which is a multiple of 2 MiB.
"""

import ctypes
import json
import mmap
import os
import sys
import time

MIB = 1 << 20
SIZE = 64 * MIB
PAGE = 2 * MIB  # MemFabric registers whole pages of this size


class End:
    """One end of a MemFabric connection.

    Args:
        role: "Prefill" or "Decode", as MemFabric's `initialize` expects it.
        device: The device number.
    """

    def __init__(self, role: str, device: int):
        import memfabric_hybrid

        self.memfabric, self.role, self.device = memfabric_hybrid, role, device
        memfabric_hybrid.set_log_level(3)
        self.engine = memfabric_hybrid.TransferEngine()
        self.area = mmap.mmap(-1, SIZE + PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.area))
        self.start = -(-start // PAGE) * PAGE

    def where(self) -> int:
        return self.start

    def create_store(self, url: str) -> int:
        return self.memfabric.create_config_store(url)

    def start_engine(self, url: str, host: str, protocol: str = "SDMA") -> dict:
        """Initializes the engine; returns the status, and the port before and after."""
        before = self.engine.get_rpc_port()
        session = f"{host}:{before}"
        kind = getattr(self.engine.TransDataOpType, protocol)
        status = self.engine.initialize(url, session, self.role, self.device, kind)
        return {"status": status, "before": before, "after": self.engine.get_rpc_port()}

    def has(self, name: str) -> bool:
        return hasattr(self.engine, name)

    def fill(self, value: int, offset: int, size: int) -> None:
        ctypes.memset(self.start + offset, value, size)

    def count(self, value: int, offset: int, size: int) -> int:
        """Counts the bytes in this range that equal `value`."""
        return ctypes.string_at(self.start + offset, size).count(bytes([value]))

    def register(self, *ranges: list[int]) -> int:
        """Registers one batch of ranges, `[offset, size]` each; returns the status."""
        starts = [self.start + offset for offset, _ in ranges]
        return self.engine.batch_register_memory(starts, [size for _, size in ranges])

    def write(self, session: str, there: int, *copies: list[int]) -> int:
        """Writes one batch of copies to a peer; returns the status.

        Args:
            session: The peer's session id.
            there: The address of the peer's memory.
            copies: `[offset here, offset in the peer's memory, size]` of each copy.
        """
        if len(copies) == 1:
            ((here, dst, size),) = copies
            return self.engine.transfer_sync_write(session, self.start + here, there + dst, size)
        sources = [self.start + here for here, _, _ in copies]
        targets = [there + dst for _, dst, _ in copies]
        sizes = [size for *_, size in copies]
        return self.engine.batch_transfer_sync_write(session, sources, targets, sizes)


def main() -> None:
    # MemFabric logs to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    role, device = sys.argv[1:]
    end = End(role.capitalize(), int(device))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        begun = time.monotonic()
        try:
            value = getattr(end, name, None) or getattr(end.engine, name)
            value = value(*arguments)
        except Exception as error:
            value = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps([value, time.monotonic() - begun]), file=answers, flush=True)
    os._exit(0)  # MemFabric's destructors wait for peers


if __name__ == "__main__":
    main()
