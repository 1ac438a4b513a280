"""A client of prefill and decode servers over HTTP, with or without a router."""

import asyncio
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec

from sglang_pd.errors import ExitCode, Refusal

NO_LIMIT = 1 << 20
ANSWER_TOKENS = 64  # tokens of a context reserved for the answer


@dataclass(frozen=True)
class Answer:
    """Token ids and their logprobs, or why there are none."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    failure: str = ""
    rounds: int = 0  # how often the server reports that it verified a draft model's tokens


class PairStats(msgspec.Struct):
    """Counts of what a decode rank compared with one prefill rank's digests."""

    requests: int = 0
    parts: int = 0
    bytes: int = 0
    mismatches: int = 0


class Difference(msgspec.Struct):
    """How many requests differed in one buffer, and the first of them, in words."""

    requests: int = 0
    example: str = ""


class RankReport(msgspec.Struct):
    """A decode rank's report, as the bootstrap server returns it."""

    decode: str
    at: str
    requests: int
    failed: int
    pairs: dict[str, PairStats]
    said: list[str]
    seconds: list[float]
    comparing: float
    differing: dict[str, Difference] = {}


class VerifyReports(msgspec.Struct):
    """Reports of all decode ranks that a prefill server sent KV to; `mode` is `fail` or `log`."""

    mode: str
    ranks: list[RankReport]


@dataclass(frozen=True)
class PrefillServer:
    """A prefill server, as it describes itself; sizes are in tokens."""

    url: str
    host: str  # of its bootstrap server, too
    bootstrap_port: int
    page_size: int
    chunk: int | None  # that it computes at a time; None for whole prompts
    longest: int  # prompt that is sure to fit


class FleetClient:
    """Sends requests to a router or another single server, or to a prefill and a decode server."""

    def __init__(self, client: httpx.AsyncClient, router: str = "", prefill="", decode=""):
        """router, prefill, decode: URLs. The client's timeout is how long an answer may take."""
        self.client, self.router, self.prefill, self.decode = client, router, prefill, decode
        self.prefills: list[PrefillServer] = []
        self.room_numbers = random.Random(time.time_ns())

    async def prefill_servers(self) -> list[PrefillServer]:
        """Requests from all prefill servers what a check needs.

        Raises Refusal if one does not answer, or is not a prefill server.
        """
        urls = [self.prefill]
        if self.router:
            listed = await self._get_json(f"{self.router}/workers")
            workers = listed.get("workers", []) if isinstance(listed, dict) else []
            urls = [worker["url"] for worker in workers if worker.get("worker_type") == "prefill"]
        if not urls:
            raise Refusal(
                ExitCode.NOT_VERIFYING,
                f"the router {self.router} lists no prefill server; pass --prefill and --decode",
            )
        self.prefills = [await self._query_prefill(url) for url in urls]
        return self.prefills

    async def _query_prefill(self, url: str) -> PrefillServer:
        about = await self._get_json(f"{url}/server_info", f"{url}/get_server_info")
        mode = about.get("disaggregation_mode")
        if mode != "prefill":
            raise Refusal(
                ExitCode.NOT_VERIFYING,
                f"{url} is not a prefill server: its mode is {mode!r}; pass the URL of a server "
                "started with --disaggregation-mode prefill",
            )
        chunk = about.get("chunked_prefill_size") or 0
        (model, *_) = (await self._get_json(f"{url}/v1/models")).get("data") or [{}]
        pool = about.get("max_total_num_tokens") or NO_LIMIT
        return PrefillServer(
            url,
            _host(url),
            about["disaggregation_bootstrap_port"],
            about.get("page_size") or 1,
            chunk if chunk > 0 else None,
            min((model.get("max_model_len") or NO_LIMIT) - ANSWER_TOKENS, pool // 2),
        )

    async def reports(self, prefill: PrefillServer) -> VerifyReports:
        """Returns what decode ranks have compared of this server's KV.

        Raises Refusal if the server does not verify, or its bootstrap server does not answer.
        """
        url = f"http://{prefill.host}:{prefill.bootstrap_port}/verify"
        try:
            response = await self.client.get(url)
        except httpx.HTTPError as error:
            raise Refusal(
                ExitCode.NOT_VERIFYING,
                f"no answer from the bootstrap server of {prefill.url}: {url}: {error!r}; open "
                "prefill's bootstrap port to this host",
            ) from error
        if response.status_code != 200:
            raise Refusal(
                ExitCode.NOT_VERIFYING,
                f"{prefill.url} does not compare KV (HTTP {response.status_code} from {url}): "
                "apply the patch set there, and start prefill and decode with SGLANG_PD_VERIFY=1",
            )
        return msgspec.json.decode(response.content, type=VerifyReports)

    async def generate(self, prompt: tuple[int, ...], new_tokens: int) -> Answer:
        """Decodes greedily, through the router, or both servers once `prefill_servers` has run."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if self.router:
            return await self._answer(self.router, body)
        (prefill,) = self.prefills
        body |= {
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": self.room_numbers.getrandbits(62),
        }
        both = (self._answer(url, body) for url in (prefill.url, self.decode))
        first, last = await asyncio.gather(*both)
        return last if last.failure or not first.failure else first

    async def _answer(self, url: str, body: dict) -> Answer:
        """Sends a request and returns the server's answer; a failure is an answer, too."""
        try:
            response = await self.client.post(f"{url}/generate", json=body)
        except httpx.HTTPError as error:
            return Answer(failure=repr(error))
        if response.status_code != 200:
            return Answer(failure=f"HTTP {response.status_code}: {response.text[:2000]}")
        about = response.json()["meta_info"]
        rows, rounds = about["output_token_logprobs"], about.get("spec_verify_ct") or 0
        ids, logprobs = (tuple(row[at] for row in rows) for at in (1, 0))
        return Answer(ids, logprobs, rounds=rounds)

    async def _get_json(self, *urls: str) -> dict:
        """Returns the answer of the first URL that has one. Raises Refusal without any."""
        reason = ""
        for url in urls:
            try:
                response = await self.client.get(url)
                response.raise_for_status()
                return response.json()
            except (httpx.HTTPError, ValueError) as error:
                reason = f"{url}: {error}"
        advice = "check the URL, that the server runs, and that its port is open to this host"
        raise Refusal(ExitCode.NOT_VERIFYING, f"no usable answer: {reason}; {advice}")


def _host(url: str) -> str:
    """Returns a URL's host, in brackets if it is an IPv6 address."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host
