"""What an engine's pools ask of the rank that they belong to, where no server is."""

import contextlib
import importlib.util


def single_rank_context(**widths: int) -> contextlib.AbstractContextManager:
    """Later releases' pools ask how many ranks share the tokens of a request, and which this is."""
    if importlib.util.find_spec("sglang.srt.runtime_context") is None:
        return contextlib.nullcontext()
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return parallel.override(**{"attn_dcp_size": 1, "attn_dcp_rank": 0, **widths})
