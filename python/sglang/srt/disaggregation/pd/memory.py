"""This rank's buffers, by name, and their registration with a transfer engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, List, Tuple

from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.kv_layout import Buffer

logger = logging.getLogger(__name__)

# Name, address, bytes.
Region = Tuple[str, int, int]
# A transfer engine's, of addresses and bytes; 0 if all are registered.
RegisterBatch = Callable[[List[int], List[int]], int]


def regions(args: KVArgs) -> Tuple[List[Region], List[Region]]:
    """KV and state; aux. A range that is there twice, as the engine may have it, is named once."""
    layout = getattr(args, "layout", None)
    described = ((), ()) if layout is None else (layout.kv, layout.state)
    state = (flat(args.state_data_ptrs), flat(args.state_data_lens))
    kv = _named("KV", described[0], args.kv_data_ptrs, args.kv_data_lens)
    held = [*kv, *_named("state", described[1], *state)]
    once = {region[1:]: region for region in reversed(held)}
    return list(reversed(once.values())), _named("aux", (), args.aux_data_ptrs, args.aux_data_lens)


def flat(numbers: Sequence) -> List[int]:
    """Later releases have a list for each kind of state."""
    parts = (one if isinstance(one, (list, tuple)) else [one] for one in numbers or ())
    return [number for part in parts for number in part]


def _named(
    role: str, described: Sequence[Buffer], ptrs: List[int], lens: List[int]
) -> List[Region]:
    """Each by its description, or by its number where not every one has a description."""
    names = [buffer.name for buffer in described]
    if len(names) != len(ptrs):
        names = [str(number) for number in range(len(ptrs))]
    return [(f"{role} {name}", *rest) for name, *rest in zip(names, ptrs, lens)]


def is_registered(register: RegisterBatch, wanted: Sequence[Region]) -> bool:
    """Register those that are not empty in one batch; whether that succeeded."""
    wanted = [region for region in wanted if region[2]]
    ptrs, lens = [ptr for _, ptr, _ in wanted], [length for *_, length in wanted]
    return not wanted or register(ptrs, lens) == 0


def why_unregistered(register: RegisterBatch, role: str, wanted: Sequence[Region]) -> str:
    """Register them in one batch; returns "", or which of them cannot be registered."""
    if is_registered(register, wanted):
        return ""
    alone = [region for region in wanted if not is_registered(register, [region])]
    failed = ", ".join(f"{name} ({length:,} bytes)" for name, _, length in alone)
    return (
        f"The transfer engine did not register this rank's {role} in one batch (buffers: "
        f"{len(wanted)}, bytes: {sum(length for *_, length in wanted):,}); one by one it "
        f"fails for: {failed or 'none'}"
    )


def registered_together(args: KVArgs, register: RegisterBatch) -> bool:
    """Register all in one batch, in which MemFabric merges small ranges; whether that succeeded.

    MemFabric also merges ranges that only touch, and then refuses what lies in two heaps.
    """
    kv, aux = regions(args)
    if is_registered(register, [*kv, *aux]):
        return True
    logger.warning("MemFabric did not register KV, state and aux in one batch: aux goes apart")
    return False


@contextlib.contextmanager
def only_logged_later(manager: Any) -> Iterator[None]:
    """Around a manager's registration of its buffers: a failure is raised when the server starts.

    Where memory is registered again at run time, as after a pause, it ends no server.
    """
    try:
        yield
    except RuntimeError as error:
        if not getattr(manager, "has_registered", False):
            raise
        logger.error(str(error))
    manager.has_registered = True


def register_apart(args: KVArgs, register: RegisterBatch, aux_is_optional: bool) -> None:
    """Register KV and state in one batch, and aux, which some transports do not take, apart.

    Raises:
        RuntimeError: A buffer that is needed cannot be registered; the text names it.
    """
    kv, aux = regions(args)
    refused = [why_unregistered(register, "KV and state", kv)]
    why_no_aux = why_unregistered(register, "aux", aux)
    if why_no_aux and aux_is_optional:
        logger.info(f"{why_no_aux}. It is not needed: aux goes over TCP")
    else:
        refused.append(why_no_aux)
    if any(refused):
        raise RuntimeError(
            f"{'. '.join(filter(None, refused))}. Without them no KV can be transferred; look "
            "for limits of locked memory and of memory regions, or choose a smaller KV pool"
        )
