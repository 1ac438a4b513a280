"""A device `npu` in this machine's memory, for tests of code that behaves differently on a device.

Its tensors report ``npu:0`` as their device. A non-blocking copy between it and the host arrives
with the next synchronization: a blocking copy, an operation that reads a number off the device, or
`synchronize`. Only `synchronize` also waits for other streams, whose pending work tests add with
`run_on_other_stream`.
"""

import contextlib
import ctypes
import functools
from types import SimpleNamespace

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

NAME = "npu"
NOT_ARRIVED = 77  # the value in host memory before a copy arrives
_pending: list = []  # this stream's outstanding work, in order
_pending_elsewhere: list = []  # outstanding work of other streams
_pinned: set[int] = set()  # addresses of pinned host memory
_libraries: list = []  # keeps torch's registrations alive
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def synchronize(device=None) -> None:
    """Waits for all streams."""
    while _pending_elsewhere:
        _pending_elsewhere.pop(0)()
    _drain()


def _drain() -> None:
    """Waits for this stream."""
    while _pending:
        _pending.pop(0)()


def run_on_other_stream(do) -> None:
    """Queues `do`, a function without arguments, as work of another stream."""
    _pending_elsewhere.append(do)


def outstanding() -> int:
    """Counts the pieces of work that are still outstanding on all streams."""
    return len(_pending) + len(_pending_elsewhere)


class DeviceTensor(torch.Tensor):
    """A tensor on the device; ``host_tensor`` has its bytes."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.host_tensor = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return _run(operator, *args, **(kwargs or {}))

    def data_ptr(self) -> int:
        return self.host_tensor.data_ptr()

    def untyped_storage(self):
        return self.host_tensor.untyped_storage()

    def set_(self, storage) -> "DeviceTensor":
        return DeviceTensor(self.host_tensor.set_(storage))  # a wrapper's shape never changes


def _run(operator, *args, **kwargs):
    """Runs the operator on the host; its results are on the device that its arguments imply."""
    leaves = tree_leaves((args, kwargs))
    of_device = {id(one.host_tensor): one for one in leaves if isinstance(one, DeviceTensor)}
    goes_to = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
    if (
        operator in COPIES
        and (done := _copy_between_devices(operator, goes_to, args, kwargs)) is not None
    ):
        return done
    args, kwargs = tree_map_only(DeviceTensor, lambda one: one.host_tensor, (args, kwargs))
    if goes_to is not None:
        kwargs["device"] = torch.device("cpu")
    result = operator(*args, **kwargs)
    on_device = goes_to == NAME or (goes_to is None and of_device)
    if on_device and not all(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
        _drain()  # the host reads a number
        result = operator(*args, **kwargs)
    if not on_device:
        return result

    def placed(one):
        if not isinstance(one, torch.Tensor):
            return one
        known = of_device.get(id(one))
        return DeviceTensor(one) if known is None else known

    return tree_map(placed, result)


def _copy_between_devices(operator, goes_to: str | None, args: tuple, kwargs: dict):
    """Copies between host and device, and returns the target; None if both are on one side."""
    if operator is torch.ops.aten.copy_.default:
        target, source, *more = args
        lazily = bool(more and more[0]) or kwargs.get("non_blocking", False)
        if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
            return None
    else:
        (source,) = args
        lazily = kwargs.get("non_blocking", False)
        if goes_to is None or (goes_to == NAME) == isinstance(source, DeviceTensor):
            return None
        dtype = kwargs.get("dtype") or source.dtype
        room = torch.empty(source.shape, dtype=dtype)
        target = DeviceTensor(room) if goes_to == NAME else room
    end = getattr(target, "host_tensor", target)
    if isinstance(source, DeviceTensor):
        # The clone stands for the device's read, which follows this stream's earlier work.
        begun = source.host_tensor.clone() if lazily else source.host_tensor
        if lazily:
            end.fill_(NOT_ARRIVED)
        _pending.append(lambda: end.copy_(begun))
    else:
        end.copy_(source)
        _pending.append(functools.partial(_assert_unchanged, source, source.clone()))
    if not lazily:
        _drain()
    return target


def _assert_unchanged(source: torch.Tensor, as_it_was: torch.Tensor) -> None:
    now, then = (one.reshape(-1).contiguous().view(torch.uint8) for one in (source, as_it_was))
    assert torch.equal(now, then), "host memory was written while the device read it"


class NpuModule(backend_registration._DummyBackendModule):
    """Stands in for `torch.npu` with `count` devices, of which one holds data."""

    def __init__(self, count: int):
        self.count = count

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return False  # or else the engine would import its NPU code

    def set_device(self, device) -> None:
        pass

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return 60 << 30, 64 << 30

    synchronize = staticmethod(synchronize)

    def current_stream(self, device=None):
        return SimpleNamespace(synchronize=synchronize)

    def Stream(self, *args, **kwargs):
        return contextlib.nullcontext(self.current_stream())

    def stream(self, stream):
        return contextlib.nullcontext(stream)


def install(count: int) -> None:
    """Installs the device in torch, once per process. Earlier queries for an NPU find none."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, NpuModule(count))
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    # If torch makes a tensor from a list, it finds no fallback for this operator.
    copies = torch.library.Library("aten", "IMPL")
    copies.impl("copy_", functools.partial(_run, torch.ops.aten.copy_.default), "PrivateUse1")
    _libraries.extend([everything, copies])
    torch.tensor, torch.arange = _make_on_host(torch.tensor), _make_on_host(torch.arange)
    torch.empty = _tracking_pinned(torch.empty)
    is_pinned = torch.Tensor.is_pinned
    torch.Tensor.is_pinned = lambda self, *a: self.data_ptr() in _pinned or is_pinned(self)


def _make_on_host(make):
    """Wraps a function that fills its tensor without dispatch, or resizes it."""

    @functools.wraps(make)
    def made(*args, device=None, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor if device is None else tensor.to(device)

    return made


def _tracking_pinned(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        tensor = make(*args, **kwargs)
        if pin_memory:
            _pinned.add(tensor.data_ptr())
        return tensor

    return made


class AclRuntime:
    """Stands in for the part of ACL's runtime that the tests call."""

    @staticmethod
    def aclrtMemcpy(target, room, source, count, direction) -> int:
        synchronize()
        ctypes.memmove(target, source.value, count.value)
        return 0
