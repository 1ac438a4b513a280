"""GigaChat's linear attention, whose convolutions differ from Mamba 2's."""

from dataclasses import replace

from sglang.srt.configs.mamba_utils import Mamba2CacheParams


class GigaChat35Config:
    RENAMED = (("mamba2_cache_params", "_engine_mamba2_cache_params"),)

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Extends the engine's: adds the whole model's channels of the q, k, v convolutions."""
        params = self._engine_mamba2_cache_params
        keys = self.linear_key_head_dim * self.linear_num_key_heads
        values = self.linear_value_head_dim * self.linear_num_value_heads
        parts = [keys, keys, values]
        return replace(params, shape=replace(params.shape, conv_shard_groups=parts))
