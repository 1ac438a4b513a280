"""`sglang-pd verify`: the requests that it sends, and its verdict on the servers' answers."""

import asyncio
import io
import json
from dataclasses import dataclass, field

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_pd.cli import app
from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.verify import check as checking
from sglang_pd.verify.check import check
from sglang_pd.verify.prompts import TOKENS, prompt_groups, prompt_lengths
from sglang_pd.verify.servers import FleetClient
from sglang_pd.verify.show import as_json, show

ROUTER, PREFILL, REFERENCE = "http://router:8000", "http://p:30000", "http://single:30000"
BYTES = 100


@dataclass
class FakeServers:
    """A router, a prefill server whose bootstrap server has reports, and a single server."""

    mode: str = "prefill"
    verifies: bool = True
    reported: int = 0  # requests
    # Lengths of prompts whose KV or answers are not right
    differs: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    unsteady: set[int] = field(default_factory=set)
    reference_differs: set[int] = field(default_factory=set)
    uncompared: int = 0
    sent_lengths: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    differing: dict[str, dict] = field(default_factory=dict)  # newer reports have this, too
    rounds: dict[str, int] = field(default_factory=dict)  # verify steps for three tokens, by host

    def answer(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if (url.host, url.path) == ("router", "/workers"):
            workers = [
                {"url": PREFILL, "worker_type": "prefill"},
                {"url": "http://d:30000", "worker_type": "decode"},
            ]
            return httpx.Response(200, json={"workers": workers})
        if url.path == "/server_info":
            about = {
                "disaggregation_mode": self.mode,
                "disaggregation_bootstrap_port": 8998,
                "page_size": 16,
                "chunked_prefill_size": 64,
                "max_total_num_tokens": 4000,
            }
            return httpx.Response(200, json=about)
        if url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"max_model_len": 1024}]})
        if (url.host, url.port, url.path) == ("p", 8998, "/verify"):
            return self.reports()
        assert url.path == "/generate", url
        return self.generate(url.host, json.loads(request.content))

    def reports(self) -> httpx.Response:
        if not self.verifies:
            return httpx.Response(404)
        count = {"requests": self.reported, "mismatches": len(self.said)}
        count |= {"parts": 8 * self.reported, "bytes": BYTES * self.reported}
        pairs = {"TP 0/1 PP 0/1": count}
        rank = {
            "decode": "TP 0/1 PP 0/1",
            "at": "10.0.0.2:4000",
            "requests": self.reported,
            "failed": len(self.said),
            "pairs": pairs if self.reported else {},
            "said": self.said[-20:],
            "seconds": [0.01] * self.reported,
            "comparing": 0.001 * self.reported,
        }
        if self.differing:
            rank["differing"] = self.differing
        return httpx.Response(200, json={"mode": "fail", "ranks": [rank]})

    def generate(self, host: str, body: dict) -> httpx.Response:
        length = len(body["input_ids"])
        token = sum(body["input_ids"]) % 200
        if host == "single":
            token += length in self.reference_differs
            return tokens(token, self.rounds.get(host))
        self.sent_lengths.append(length)
        if length in self.unanswered:
            return httpx.Response(500, text="no")
        self.reported += self.sent_lengths.count(length) > self.uncompared
        if length in self.differs:
            self.said.append(f"KV of {length} tokens")
            for known in self.differing.values():
                known["requests"] += 1
            return httpx.Response(500, text=f"KV verification failed: {length} tokens")
        token += length in self.unsteady and self.sent_lengths.count(length) > 1
        return tokens(token, self.rounds.get(host))


def tokens(first: int, rounds: int | None = None) -> httpx.Response:
    rows = [[-0.5, first + n, None] for n in range(4)]
    drafted = {} if rounds is None else {"spec_verify_ct": rounds}
    return httpx.Response(200, json={"meta_info": {"output_token_logprobs": rows, **drafted}})


@pytest.fixture
def run_check(monkeypatch):
    """A function that checks servers; returns the verdict."""
    monkeypatch.setattr(checking, "REPORT_TIMEOUT_S", 0.2)

    def checked(servers: FakeServers, reference: str = "", lengths=(1, 40, 5000)):
        async def run():
            transport = httpx.MockTransport(servers.answer)
            async with httpx.AsyncClient(transport=transport) as client:
                return await check(FleetClient(client, ROUTER), lengths, 5, 4, reference)

        return asyncio.run(run())

    return checked


def rendered_text(verdict) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(verdict, console)
    return console.export_text()


def test_matching_kv_passes(run_check):
    servers = FakeServers(reported=7)
    verdict = run_check(servers)
    assert verdict.passed
    assert verdict.requests == verdict.compared == servers.reported - 7 == len(servers.sent_lengths)
    ((_, count),) = verdict.pairs.items()
    assert count.bytes == BYTES * verdict.requests
    assert max(verdict.lengths) == 129  # two chunks and a token; 5000 do not fit
    report = as_json(verdict)
    assert report["right"] and report["transfer_seconds"] == {"median": 0.01, "longest": 0.01}
    assert "all KV matches prefill" in rendered_text(verdict)


def test_kv_mismatch_is_reported(run_check):
    verdict = run_check(FakeServers(differs={17}))
    assert not verdict.passed
    assert set(verdict.mismatches) == {"KV of 17 tokens"}  # an older patch set's report
    assert not verdict.failures and verdict.stopped == len(verdict.mismatches) > 1
    assert verdict.answered == verdict.requests - verdict.stopped
    text = rendered_text(verdict)
    assert "FAILED" in text and "KV that differs" in text
    assert f"{verdict.stopped} requests were stopped for that" in text
    assert as_json(verdict)["stopped"] == verdict.stopped


def test_each_differing_buffer_is_reported_once(run_check):
    """With how many requests differed there since the check began."""
    known = {
        "k, layer 1 (ranks)": {"requests": 5, "example": "room 7: k, layer 1 and 1 more (ranks)"},
        "no prefill rank sent v, layer 1": {"requests": 5, "example": ""},
    }
    servers = FakeServers(differs={17}, differing=known)
    verdict = run_check(servers)
    count = f"requests: {verdict.stopped}"
    assert verdict.mismatches == [
        f"k, layer 1 (ranks): {count}, such as room 7: k, layer 1 and 1 more (ranks)",
        f"no prefill rank sent v, layer 1: {count}",
    ]
    servers.differs.clear()
    assert run_check(servers).passed  # what was before is not reported again


def test_uncompared_request_fails(run_check):
    verdict = run_check(FakeServers(uncompared=1))
    assert verdict.answered == verdict.requests > verdict.compared
    assert not verdict.passed


def test_unanswered_request_fails(run_check):
    verdict = run_check(FakeServers(unanswered={40}))
    assert "40 tokens, one at a time: HTTP 500: no" in verdict.failures
    assert not verdict.passed


def test_differing_answers_are_reported_without_failure(run_check):
    verdict = run_check(FakeServers(unsteady={40}))
    assert verdict.passed
    assert any(line.startswith("40 tokens, one at a time: ") for line in verdict.unequal)
    assert "Prompts whose two answers differ" in rendered_text(verdict)


def test_answers_are_compared_with_reference(run_check):
    assert run_check(FakeServers(), REFERENCE).from_reference == []
    verdict = run_check(FakeServers(reference_differs={31}), REFERENCE)
    assert not verdict.passed
    assert verdict.from_reference
    assert all("31 tokens" in line for line in verdict.from_reference)


@pytest.mark.parametrize(
    "rounds, reference, here, there, said",
    [
        ({}, "", None, None, ""),
        ({}, REFERENCE, None, None, ""),
        ({"router": 2}, "", 1.5, None, "1.50 tokens per verify step; 1 means no accepted draft"),
        ({"router": 2, "single": 2}, REFERENCE, 1.5, 1.5, "step, 1.50 in the reference\n"),
        ({"router": 3, "single": 2}, REFERENCE, 1.0, 1.5, "does the draft's KV arrive?"),
        ({"single": 2}, REFERENCE, None, 1.5, "reference has a draft model, the fleet does not"),
    ],
)
def test_draft_acceptance_is_reported(run_check, rounds, reference, here, there, said):
    """Fewer accepted tokens are reported, but not a failure: on accelerators sums may differ."""
    verdict = run_check(FakeServers(rounds=rounds), reference)
    assert verdict.passed
    assert as_json(verdict)["tokens_a_verify_step"] == {"fleet": here, "reference": there}
    text = rendered_text(verdict)
    assert said in text and ("drafts: " in text) == bool(said)


@pytest.mark.parametrize(
    "servers, why",
    [
        (FakeServers(verifies=False), "start prefill and decode with SGLANG_PD_VERIFY=1"),
        (FakeServers(mode="decode"), "is not a prefill server: its mode is 'decode'"),
    ],
)
def test_servers_without_verification_are_refused(run_check, servers, why):
    with pytest.raises(Refusal, match=why) as raised:
        run_check(servers)
    assert raised.value.code == ExitCode.NOT_VERIFYING


def test_prompt_lengths_cover_page_and_chunk_borders():
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 79, 80, 81, 129]
    assert prompt_lengths([1, 9000], 16, 64, 200) == lengths
    assert 0 not in prompt_lengths([1], 1, None, 100)


def test_prompt_groups_share_prefix_and_fill_burst():
    one, prefix, burst = prompt_groups([1, 40, 600], 16, 9)
    assert [len(prompt) for prompt in one.prompts] == [1, 40, 600]
    assert len(prefix.prompts) == 3 and len({prompt[:48] for prompt in prefix.prompts}) == 1
    assert len(set(prefix.prompts)) == 3
    assert len(burst.prompts) == 9 and burst.at_once
    prompts = [*one.prompts, *prefix.prompts, *burst.prompts]
    assert {token for prompt in prompts for token in prompt} <= set(TOKENS)


@pytest.mark.parametrize(
    "words, why",
    [
        ([], "--router"),
        (["--prefill", PREFILL], "--router"),
        (["--router", ROUTER, "--prefill", PREFILL, "--decode", PREFILL], "--router"),
        (["--router", ROUTER, "--lengths", "1,x"], "numbers separated by commas"),
    ],
)
def test_invalid_verify_options_are_refused(words, why):
    got = CliRunner().invoke(app, ["verify", *words])
    assert got.exit_code == 2
    assert why in got.stderr


def test_unreachable_router_is_refused():
    got = CliRunner().invoke(app, ["verify", "--router", "http://127.0.0.1:9", "--json"])
    assert got.exit_code == ExitCode.NOT_VERIFYING
    error = json.loads(got.stdout)["error"]
    assert error["name"] == "NOT_VERIFYING" and "http://127.0.0.1:9/workers" in error["text"]


def test_verify_sends_api_key(monkeypatch):
    client, sent = httpx.AsyncClient, set()

    def answer(request: httpx.Request) -> httpx.Response:
        sent.add(request.headers.get("Authorization"))
        return httpx.Response(401)

    def made(**options) -> httpx.AsyncClient:
        return client(transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr("sglang_pd.cli.httpx.AsyncClient", made)
    CliRunner().invoke(app, ["verify", "--router", ROUTER, "--api-key", "secret"])
    assert sent == {"Bearer secret"}
