"""How a server splits a model over its ranks."""

import os
from dataclasses import dataclass

PARTITION_VARIABLE = "SGLANG_PP_LAYER_PARTITION"


@dataclass(frozen=True)
class ServerSizes:
    """The sizes of one server."""

    tp: int = 1  # ranks per stage
    pp: int = 1  # pipeline stages
    dp: int = 1  # groups of a stage's ranks, each with its own attention and requests
    layers: tuple[int, ...] = ()  # number of layers of each stage; empty: the engine's choice
    draft: int = 0  # layers of the draft model, which the last stage holds
    page: int = 0  # tokens per page; 0 for the engine's default

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Number of ranks over which attention, and so a request's KV, is split."""
        return self.tp // self.dp

    def stages(self, total: int) -> list[range]:
        """Splits `total` layers into stages; the last stages take the remainder.

        Raises ValueError if `layers` does not match `pp` or `total`, or a stage has no layer.
        """
        counts = self.layers
        if not counts:
            each, more = divmod(total, self.pp)
            counts = [each + (stage >= self.pp - more) for stage in range(self.pp)]
        if len(counts) != self.pp or sum(counts) != total or min(counts) < 1:
            raise ValueError(
                f"{total} layers cannot be split into {self.pp} stages of "
                f"{_format_layers(counts)}; "
                f"give a pp, or layers of each stage ({PARTITION_VARIABLE}), that fit the model"
            )
        starts = [sum(counts[:stage]) for stage in range(self.pp)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def __str__(self) -> str:
        parts = [f"tp={self.tp}"]
        parts += [f"{name}={value}" for name in ("pp", "dp") if (value := getattr(self, name)) != 1]
        parts += [f"layers={_format_layers(self.layers)}"] if self.layers else []
        parts += [f"draft={self.draft}"] if self.draft else []
        return ",".join(parts)


def parse_sizes(text: str, draft: int = 0, page: int = 0) -> ServerSizes:
    """Parses text such as `tp=4,pp=2,layers=30+31`; `draft` and `page` are its defaults.

    `SGLANG_PP_LAYER_PARTITION` is the default of `layers`. Raises ValueError if the text is
    invalid, or no server starts with its sizes.
    """
    given: dict = {"draft": draft, "page": page}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in ("tp", "pp", "dp", "layers", "draft", "page"):
            raise ValueError(
                f"{part!r} is not a size; sizes are tp, pp, dp, draft and page, each with "
                "=NUMBER, and layers=NUMBER+NUMBER+... (one number per stage)"
            )
        given[name] = _numbers(value, part) if name == "layers" else _number(value, part)
    sizes = ServerSizes(**given)
    if sizes.pp > 1 and not sizes.layers and (partition := os.environ.get(PARTITION_VARIABLE)):
        numbers = _numbers(partition.replace(",", "+"), f"{PARTITION_VARIABLE}={partition}")
        sizes = ServerSizes(**{**given, "layers": numbers})
    if min(sizes.tp, sizes.pp, sizes.dp) < 1:
        raise ValueError(f"{text!r}: tp, pp and dp must be 1 or more")
    if sizes.tp % sizes.dp:
        raise ValueError(
            f"{text!r}: {sizes.tp} TP ranks cannot form {sizes.dp} groups of equal size; "
            "choose a dp that divides tp"
        )
    return sizes


def _number(text: str, part: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{part!r}: {text!r} is not a number")
    return int(text)


def _numbers(text: str, part: str) -> tuple[int, ...]:
    return tuple(_number(one, part) for one in text.split("+"))


def _format_layers(counts) -> str:
    return "+".join(map(str, counts))
