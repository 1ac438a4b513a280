"""Gathers what decode ranks compared where a client can query it: prefill's bootstrap server.

decode rank  -- PUT /verify, once a second after changes -->     bootstrap server
`sglang-pd verify`  -- GET /verify -->                           all ranks' reports
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Dict, List, Optional, Set

import msgspec
import requests
from aiohttp import web
from sglang.srt.disaggregation.pd.verify_mode import verify_mode

logger = logging.getLogger(__name__)

REPORT_INTERVAL_SECONDS = 1.0
HTTP_TIMEOUT_SECONDS = (2, 5)
# How many of the latest are kept: mismatches in words, durations of transfers, and ranks.
MAX_MISMATCHES = 20
# How many differences are counted; a report must not exceed 1 MiB.
MAX_DIFFERENCES = 1024
MAX_DURATIONS = 1024
MAX_RANKS = 4096


class PairStats(msgspec.Struct):
    """Numbers of what a decode rank compared with one prefill rank's digests."""

    requests: int = 0
    parts: int = 0
    bytes: int = 0
    mismatches: int = 0


class Difference(msgspec.Struct):
    """How many rooms differed in one buffer between one pair of ranks, and the first, in words."""

    requests: int = 0
    example: str = ""


class VerifyReport(msgspec.Struct):
    """A decode rank's report on what arrived from one prefill server.

    Attributes:
        decode, at: The rank, such as `TP 0/2 PP 0/1`, and HOST:PORT where it reads messages.
        requests, failed: Numbers of rooms that were compared, and that differed.
        pairs: Numbers by prefill rank.
        said: The last mismatches, in words.
        differing: By buffer and pair of ranks.
        seconds: Durations of the last transfers, from the request to prefill to the last arrival.
        comparing: Seconds that all comparisons took.
    """

    decode: str
    at: str
    requests: int = 0
    failed: int = 0
    pairs: Dict[str, PairStats] = msgspec.field(default_factory=dict)
    said: List[str] = msgspec.field(default_factory=list)
    seconds: List[float] = msgspec.field(default_factory=list)
    comparing: float = 0.0
    differing: Dict[str, Difference] = msgspec.field(default_factory=dict)

    def add(
        self, said: List[str], differing: Dict[str, str], seconds: float, comparing: float
    ) -> None:
        """Adds one compared room.

        Args:
            said: Its mismatches, in words.
            differing: An example for each buffer and pair of ranks that differ.
            seconds, comparing: Of its transfer, and of its comparison.
        """
        self.requests += 1
        self.comparing += comparing
        self.seconds = [*self.seconds[1 - MAX_DURATIONS :], seconds]
        if said:
            self.failed += 1
            self.said = [*self.said[1 - MAX_MISMATCHES :], "; ".join(said)]
        for what, example in differing.items():
            if what in self.differing or len(self.differing) < MAX_DIFFERENCES:
                self.differing.setdefault(what, Difference(example=example)).requests += 1


class ReportSender:
    """A decode rank's reports, by bootstrap address, and the thread that sends them."""

    def __init__(self, decode: str):
        self.decode = decode
        self.lock = threading.Lock()
        self.by_address: Dict[str, VerifyReport] = {}
        self.changed: Set[str] = set()
        self.thread: Optional[threading.Thread] = None

    def report_for(self, address: str, at: str) -> VerifyReport:
        """Returns a prefill server's report; hold `lock`, and call `mark_changed` afterwards.

        Args:
            address: The prefill server's bootstrap address.
            at: HOST:PORT where this rank reads messages.
        """
        return self.by_address.setdefault(address, VerifyReport(self.decode, at))

    def mark_changed(self, address: str) -> None:
        """Has the report for this prefill server sent within about a second."""
        self.changed.add(address)
        if self.thread is None:
            thread = threading.Thread(target=self._send_all, daemon=True)
            try:
                thread.start()
                self.thread = thread
            except RuntimeError as error:  # out of threads; the scheduler must go on
                logger.warning(f"Verification results are not reported yet: {error}")

    def _send_all(self) -> None:
        while True:
            with self.lock:
                bodies = {one: msgspec.json.encode(self.by_address[one]) for one in self.changed}
                self.changed.clear()
            for address, body in bodies.items():
                self._send(address, body)
            time.sleep(REPORT_INTERVAL_SECONDS)

    def _send(self, address: str, body: bytes) -> None:
        """Sends a report; if it is lost, the next one includes what it said."""
        try:
            url = f"http://{address}/verify"
            requests.put(url, data=body, timeout=HTTP_TIMEOUT_SECONDS).raise_for_status()
        except Exception as error:  # `requests` also raises other libraries' errors
            logger.info(f"Could not report verification results to {address}: {error}")


class VerifyRoutes:
    """Base of a bootstrap server: adds routes for reports, unless nothing is compared."""

    def _setup_routes(self) -> None:
        super()._setup_routes()
        if verify_mode():
            self.reports: Dict[str, VerifyReport] = {}
            self.app.router.add_put("/verify", self._take_report)
            self.app.router.add_get("/verify", self._show_reports)

    async def _take_report(self, request: web.Request) -> web.Response:
        try:
            report = msgspec.json.decode(await request.read(), type=VerifyReport)
        except msgspec.MsgspecError as error:
            return web.Response(text=f"not a report: {error}", status=400)
        self.reports.pop(report.at, None)
        self.reports[report.at] = report
        if len(self.reports) > MAX_RANKS:
            del self.reports[next(iter(self.reports))]
        return web.Response(text="OK")

    async def _show_reports(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode({"mode": verify_mode(), "ranks": list(self.reports.values())})
        return web.Response(body=body, content_type="application/json")
