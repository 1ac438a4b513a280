"""`kv_layout`, the core that the patched engine runs, which needs no engine."""

from sglang_pd.engine_free import load

kv_layout = load("kv_layout")
