"""Names this rank's buffers, and registers them with a transfer engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, List, Tuple

from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import Buffer
from sglang.srt.disaggregation.pd.packed_mode import MEMORY_VARIABLE

logger = logging.getLogger(__name__)

# MemFabric registers whole pages of this size.
PAGE_BYTES = 2 << 20
# Name, address, bytes.
Region = Tuple[str, int, int]
# A transfer engine's function of addresses and bytes; returns 0 if all are registered.
RegisterBatch = Callable[[List[int], List[int]], int]


def memory_regions(args: KVArgs) -> Tuple[List[Region], List[Region]]:
    """Returns the regions of KV and state, and those of aux.

    A range of KV or state that the engine lists twice is returned once.
    """
    layout = getattr(args, "layout", None)
    described = ((), ()) if layout is None else (layout.kv, layout.state)
    state = (flatten(args.state_data_ptrs), flatten(args.state_data_lens))
    kv = _name_regions("KV", described[0], args.kv_data_ptrs, args.kv_data_lens)
    held = [*kv, *_name_regions("state", described[1], *state)]
    once = {region[1:]: region for region in reversed(held)}
    return list(reversed(once.values())), _name_regions(
        "aux", (), args.aux_data_ptrs, args.aux_data_lens
    )


def packing_regions(args: KVArgs) -> List[Region]:
    """Returns the region of the packing buffer, if this rank has one."""
    packing = getattr(args, "packing", None)
    return [] if packing is None else [packing.region]


def send_slices_instead(args: KVArgs, why: str) -> None:
    """Gives up the packing buffer, which the transfer engine did not register."""
    ((_, _, nbytes),) = packing_regions(args)
    args.packing = None
    logger.warning(
        f"The transfer engine did not register the {nbytes:,} bytes in which KV heads are packed "
        f"({why}); they are sent token by token to decode servers of a larger TP size. Raise the "
        f"limits of locked memory and of memory regions, or lower {MEMORY_VARIABLE}"
    )


def flatten(numbers: Sequence) -> List[int]:
    """Returns one list of numbers; later releases have a list for each kind of state."""
    parts = (one if isinstance(one, (list, tuple)) else [one] for one in numbers or ())
    return [number for part in parts for number in part]


def _name_regions(
    role: str, described: Sequence[Buffer], ptrs: List[int], lens: List[int]
) -> List[Region]:
    """Names each buffer by its description, or by its index unless all are described."""
    names = [buffer.name for buffer in described]
    if len(names) != len(ptrs):
        names = [str(number) for number in range(len(ptrs))]
    return [(f"{role} {name}", *rest) for name, *rest in zip(names, ptrs, lens)]


def try_register(register: RegisterBatch, wanted: Sequence[Region]) -> bool:
    """Registers the regions that are not empty in one batch; returns whether that succeeded."""
    wanted = [region for region in wanted if region[2]]
    ptrs, lens = [ptr for _, ptr, _ in wanted], [length for *_, length in wanted]
    return not wanted or register(ptrs, lens) == 0


def registration_error(register: RegisterBatch, role: str, wanted: Sequence[Region]) -> str:
    """Registers regions in one batch or, if that fails, one by one.

    Returns "" if all are registered in the end, otherwise which of them cannot be.
    """
    if try_register(register, wanted):
        return ""
    alone = [region for region in wanted if not try_register(register, [region])]
    said = (
        f"The transfer engine did not register this rank's {role} in one batch (buffers: "
        f"{len(wanted)}, bytes: {sum(length for *_, length in wanted):,})"
    )
    if alone:
        return f"{said}; one by one, it could not register: {_list_regions(alone)}"
    logger.warning(f"{said}, but registered all of them one by one")
    return ""


def _list_regions(those: Sequence[Region]) -> str:
    """Formats regions, such as `aux 0 (4,096 bytes from 0x7f00)`."""
    return ", ".join(f"{name} ({length:,} bytes from {start:#x})" for name, start, length in those)


@contextlib.contextmanager
def raise_only_at_startup(manager: Any) -> Iterator[None]:
    """Raises a RuntimeError of a manager's registration of buffers only while the server starts.

    If memory is registered again at run time, as after a pause, logs the failure: it must not stop
    the server. The manager's `has_registered` tells which of the two it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not manager.has_registered:
            raise
        logger.error(str(error))
    manager.has_registered = True


def register_ranges(args: KVArgs, register: RegisterBatch, aux_is_optional: bool) -> None:
    """Registers all buffers with MemFabric in one batch or, if that fails, range by range.

    Without the packing buffer, this rank sends slices.

    On prefill, MemFabric 1.1.3 and later register at the first write to a decode rank: memory that
    they cannot register fails that write, not the start.

    Args:
        aux_is_optional: Whether aux goes over TCP.

    Raises:
        RuntimeError: A range that is needed cannot be registered; the text names its buffers.
    """
    kv, aux = memory_regions(args)
    packing = packing_regions(args)
    held = [region for region in (*kv, *packing, *aux) if region[2]]
    if try_register(register, held):
        return
    ranges = group_by_page(held)
    refused = [some for some in ranges if not try_register(register, some)]
    if packing and packing in refused:
        refused.remove(packing)
        send_slices_instead(args, "neither in one batch with the others nor alone")
    optional = aux if aux_is_optional else []
    buffers = [region for some in refused for region in some if region not in optional]
    said = f"MemFabric did not register this rank's {len(held)} buffers in one batch"
    if not refused:
        logger.warning(f"{said}, but registered all of them range by range")
    elif not buffers:
        logger.info(f"{said}, nor aux separately. Not needed: aux is sent over TCP")
    elif _rejects_registered_memory(register, ranges, refused):
        logger.error(
            f"{said}; range by range, it rejects: {_list_regions(buffers)}. This release also "
            "rejects what it has already registered, so some of these may be registered; writes "
            "to the others fail"
        )
    else:
        raise RuntimeError(
            f"{said}; range by range, it rejects: {_list_regions(buffers)}. Without them no KV "
            "can be transferred; MemFabric's log (ASCEND_MF_LOG_LEVEL=1) has the reason"
        )


def group_by_page(held: Sequence[Region]) -> List[List[Region]]:
    """Groups regions that share a 2 MiB page, in address order, as MemFabric merges a batch.

    MemFabric looks an address up by the range that begins nearest before it. So a buffer that is
    registered separately hides part of the range that it lies in, and a buffer that begins where a
    shorter range begins is not registered at all, whatever the status says.
    """
    ranges: List[List[Region]] = []
    end = 0
    for region in sorted(held, key=lambda region: region[1]):
        _, start, length = region
        if start // PAGE_BYTES * PAGE_BYTES >= end:
            ranges.append([])
        ranges[-1].append(region)
        end = max(end, -(-(start + length) // PAGE_BYTES) * PAGE_BYTES)
    return ranges


def _rejects_registered_memory(register: RegisterBatch, ranges: List, refused: List) -> bool:
    """Whether MemFabric rejects a range that it has just registered, as 1.1.4 to 1.2.1 do."""
    taken = [some for some in ranges if some not in refused]
    return bool(taken) and not try_register(register, taken[0])


def register_after_pause(args: KVArgs, register: RegisterBatch) -> None:
    """Registers all buffers with MemFabric after a pause, as the engine does.

    No release of MemFabric can unregister. From 1.1.3 on, what was registered at the start stays
    registered unchanged; these releases reject it the second time, or do nothing (1.3.0).
    """
    kv, aux = memory_regions(args)
    if not try_register(register, [*kv, *packing_regions(args), *aux]):
        logger.warning(
            "MemFabric did not register this rank's buffers again; those registered at the start "
            "stay registered, because no release of MemFabric can unregister"
        )


def register_kv_then_aux(args: KVArgs, register: RegisterBatch, aux_is_optional: bool) -> None:
    """Registers KV and state in one batch, then aux, which some transports reject, then packing.

    Without the packing buffer, this rank sends slices.

    Raises:
        RuntimeError: A buffer that is needed cannot be registered; the text names it.
    """
    kv, aux = memory_regions(args)
    refused = [registration_error(register, "KV and state", kv)]
    why_no_aux = registration_error(register, "aux", aux)
    if why_no_aux and aux_is_optional:
        logger.info(f"{why_no_aux}. Not needed: aux is sent over TCP")
    else:
        refused.append(why_no_aux)
    if any(refused):
        raise RuntimeError(
            f"{'. '.join(filter(None, refused))}. Without them no KV can be transferred; "
            "raise the limits of locked memory and of memory regions, or use a smaller KV pool"
        )
    if not try_register(register, packing_regions(args)):
        send_slices_instead(args, "it registered the others")
