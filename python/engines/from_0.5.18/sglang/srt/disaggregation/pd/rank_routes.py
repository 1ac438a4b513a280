"""Prefill's bootstrap server: adds to a rank's address what the patch set supports there."""

from __future__ import annotations

import json

from aiohttp import web
from sglang.srt.disaggregation.pd.packed_mode import is_packed_mode
from sglang.srt.disaggregation.pd.verify_mode import verify_mode
from sglang.srt.disaggregation.pd.verify_reports import VerifyRoutes


class RankRoutes(VerifyRoutes):
    """Base of a bootstrap server, before the engine's."""

    async def _handle_route_get(self, request: web.Request):
        """Answers a route query. Extends the engine's: adds what the rank supports."""
        response = await super()._handle_route_get(request)
        if response.status != 200:
            return response
        known = json.loads(response.text)
        # Not for the whole server: stock decode servers reject new fields in that answer.
        if "rank_port" in known:
            known.update(
                reads_layouts=True, verifies=bool(verify_mode()), names_units=is_packed_mode()
            )
        return web.json_response(known)
