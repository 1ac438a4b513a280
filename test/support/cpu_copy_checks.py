"""Fill a pool, copy slots to the host and back to other slots, and compare every byte."""

import torch


def as_tokens(pool) -> dict[str, torch.Tensor]:
    """Returns each buffer as [tokens, elements] per layer, from the tensors attention reads."""
    names = ["k_buffer", "v_buffer", "index_k_buffer"]
    parts = {name: getattr(pool, name, None) for name in names}
    return {
        name: [layer.view(pool.size + pool.page_size, -1) for layer in layers]
        for name, layers in parts.items()
        if layers is not None
    }


def fill(pool) -> None:
    for number, layers in enumerate(as_tokens(pool).values()):
        for layer, buffer in enumerate(layers):
            start = (number * 10 + layer) * 100_000
            values = torch.arange(start, start + buffer.numel(), dtype=buffer.dtype)
            buffer.copy_(values.view(buffer.shape))


def assert_moved(pool, before: dict, source: list[int], target: list[int], but: str = "") -> None:
    """Asserts that `target` slots hold what `source` held, and that no other slot changed.

    Args:
        before: The pool's `snapshot` before the copy.
        but: Name of a buffer that is not checked.
    """
    for name, layers in as_tokens(pool).items():
        if name == but:
            continue
        for layer, buffer in enumerate(layers):
            expected = before[name][layer].clone()
            expected[target] = before[name][layer][source]
            assert torch.equal(buffer, expected), f"{name}, local layer {layer}"


def snapshot(pool) -> dict:
    return {name: [layer.clone() for layer in layers] for name, layers in as_tokens(pool).items()}


def tensors(copied) -> list[torch.Tensor]:
    if isinstance(copied, torch.Tensor):
        return [copied]
    return [tensor for part in copied for tensor in tensors(part)]


def round_trip(pool, source: list[int], target: list[int], *more, **named) -> None:
    """Copies `source` slots to the host, loads them into `target` slots, and checks all slots."""
    fill(pool)
    before = snapshot(pool)
    index = torch.tensor(source, dtype=torch.int32)
    copied = pool.get_cpu_copy(index, *more, **named)
    assert all(part.device.type == "cpu" for part in tensors(copied))
    pool.load_cpu_copy(copied, torch.tensor(target), *more, **named)
    assert_moved(pool, before, source, target)
