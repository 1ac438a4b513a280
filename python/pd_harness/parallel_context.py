"""The parallel context that an engine's KV pools read, for code that runs without a server."""

import contextlib
import importlib.util


def single_rank_context(**widths: int) -> contextlib.AbstractContextManager:
    """A context of one rank: later releases' pools read how many ranks share a request's tokens.

    ``widths`` override further values; in 0.5.9 the context does nothing.
    """
    if importlib.util.find_spec("sglang.srt.runtime_context") is None:
        return contextlib.nullcontext()
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return parallel.override(**{"attn_dcp_size": 1, "attn_dcp_rank": 0, **widths})
