"""`sglang-pd verify`: which requests it sends, and what it makes of what servers say."""

import asyncio
import json
from dataclasses import dataclass, field

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_pd.cli import app
from sglang_pd.errors import Code, Refusal
from sglang_pd.verifying import check as checking
from sglang_pd.verifying.check import check
from sglang_pd.verifying.fleet import Fleet
from sglang_pd.verifying.prompts import TOKENS, groups, lengths_to_try
from sglang_pd.verifying.show import as_json, show

ROUTER, PREFILL, REFERENCE = "http://router:8000", "http://p:30000", "http://single:30000"
BYTES = 100


@dataclass
class Servers:
    """A router, a prefill server whose bootstrap server has reports, and a server alone."""

    mode: str = "prefill"
    verifies: bool = True
    reported: int = 0  # requests
    differs: set[int] = field(default_factory=set)  # lengths of prompts
    unanswered: set[int] = field(default_factory=set)
    unsteady: set[int] = field(default_factory=set)
    uncompared: int = 0
    asked: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)  # of three tokens, by host

    def answer(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if (url.host, url.path) == ("router", "/workers"):
            workers = [
                {"url": PREFILL, "worker_type": "prefill"},
                {"url": "http://d:30000", "worker_type": "decode"},
            ]
            return httpx.Response(200, json={"workers": workers})
        if url.path == "/server_info":
            return httpx.Response(
                200,
                json={
                    "disaggregation_mode": self.mode,
                    "disaggregation_bootstrap_port": 8998,
                    "page_size": 16,
                    "chunked_prefill_size": 64,
                    "max_total_num_tokens": 4000,
                },
            )
        if url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"max_model_len": 1024}]})
        if (url.host, url.port, url.path) == ("p", 8998, "/verify"):
            return self.reports()
        assert url.path == "/generate", url
        return self.generate(url.host, json.loads(request.content))

    def reports(self) -> httpx.Response:
        if not self.verifies:
            return httpx.Response(404)
        count = {
            "requests": self.reported,
            "parts": 8 * self.reported,
            "mismatches": len(self.said),
        }
        pairs = {"TP 0/1 PP 0/1": {**count, "bytes": BYTES * self.reported}}
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
        return httpx.Response(200, json={"mode": "fail", "ranks": [rank]})

    def generate(self, host: str, body: dict) -> httpx.Response:
        length = len(body["input_ids"])
        token = sum(body["input_ids"]) % 200
        if host == "single":
            token += length in self.differs
            return tokens(token, self.rounds.get(host))
        self.asked.append(length)
        if length in self.unanswered:
            return httpx.Response(500, text="no")
        self.reported += self.asked.count(length) > self.uncompared
        if length in self.differs:
            self.said.append(f"KV of {length} tokens")
            return httpx.Response(500, text=f"KV is not what prefill has: {length} tokens")
        token += length in self.unsteady and self.asked.count(length) > 1
        return tokens(token, self.rounds.get(host))


def tokens(first: int, rounds: int | None = None) -> httpx.Response:
    rows = [[-0.5, first + n, None] for n in range(4)]
    drafted = {} if rounds is None else {"spec_verify_ct": rounds}
    return httpx.Response(200, json={"meta_info": {"output_token_logprobs": rows, **drafted}})


@pytest.fixture
def found(monkeypatch):
    """Function: what a check of these servers finds."""
    monkeypatch.setattr(checking, "REPORTED_SECONDS", 0.2)

    def checked(servers: Servers, reference: str = "", lengths=(1, 40, 5000)):
        async def run():
            transport = httpx.MockTransport(servers.answer)
            async with httpx.AsyncClient(transport=transport) as client:
                return await check(Fleet(client, ROUTER), lengths, 5, 4, reference)

        return asyncio.run(run())

    return checked


def shown(verdict) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(verdict, console)
    return console.export_text()


def test_all_is_right(found):
    servers = Servers()
    servers.reported = 7  # before the check
    verdict = found(servers)
    assert verdict.is_right
    assert verdict.requests == verdict.compared == servers.reported - 7 == len(servers.asked)
    ((_, count),) = verdict.pairs.items()
    assert count.bytes == BYTES * verdict.requests
    assert max(verdict.lengths) == 129  # two chunks and a token; 5000 do not fit
    told = as_json(verdict)
    assert told["right"] and told["transfer_seconds"] == {"median": 0.01, "longest": 0.01}
    assert "every byte of KV is prefill's" in shown(verdict)


def test_what_differs_is_told(found):
    verdict = found(Servers(differs={17}))
    assert not verdict.is_right
    assert set(verdict.mismatches) == {"KV of 17 tokens"}
    assert all("17 tokens" in failure for failure in verdict.failures)
    text = shown(verdict)
    assert "NOT right" in text
    assert "KV that differs" in text


def test_what_was_not_compared_is_not_right(found):
    verdict = found(Servers(uncompared=1))
    assert verdict.answered == verdict.requests > verdict.compared
    assert not verdict.is_right


def test_requests_without_an_answer(found):
    verdict = found(Servers(unanswered={40}))
    assert "40 tokens, one after the other: HTTP 500: no" in verdict.failures
    assert not verdict.is_right


def test_answers_that_differ_are_told_and_no_failure(found):
    verdict = found(Servers(unsteady={40}))
    assert verdict.is_right
    assert any(line.startswith("40 tokens, one after the other: ") for line in verdict.unequal)
    assert "Prompts whose two answers differ" in shown(verdict)


def test_a_reference(found):
    assert found(Servers(), REFERENCE).from_reference == []

    class Wrong(Servers):
        def generate(self, host, body):
            if host == "single" and len(body["input_ids"]) == 31:
                return tokens(999)
            return super().generate(host, body)

    verdict = found(Wrong(), REFERENCE)
    assert not verdict.is_right
    assert all("31 tokens" in line for line in verdict.from_reference)
    assert verdict.from_reference


@pytest.mark.parametrize(
    "rounds, reference, here, there, said",
    [
        ({}, "", None, None, ""),
        ({}, REFERENCE, None, None, ""),
        ({"router": 2}, "", 1.5, None, "drafts: 1.50 tokens a verify step; 1 is no accepted draft"),
        ({"router": 2, "single": 2}, REFERENCE, 1.5, 1.5, "step, 1.50 in the reference\n"),
        ({"router": 3, "single": 2}, REFERENCE, 1.0, 1.5, "does the draft's KV arrive?"),
        ({"single": 2}, REFERENCE, None, 1.5, "the reference has a draft model, the fleet none"),
    ],
)
def test_drafts(found, rounds, reference, here, there, said):
    """Fewer accepted ones are told, and no failure: on accelerators sums are not always alike."""
    verdict = found(Servers(rounds=rounds), reference)
    assert verdict.is_right
    assert as_json(verdict)["tokens_a_verify_step"] == {"fleet": here, "reference": there}
    text = shown(verdict)
    assert said in text and ("drafts: " in text) == bool(said)


@pytest.mark.parametrize(
    "servers, why",
    [
        (Servers(verifies=False), "start prefill and decode with SGLANG_PD_VERIFY=1"),
        (Servers(mode="decode"), "is no prefill server: its mode is 'decode'"),
    ],
)
def test_servers_that_do_not_compare(found, servers, why):
    with pytest.raises(Refusal, match=why) as raised:
        found(servers)
    assert raised.value.code == Code.NOT_VERIFYING


def test_lengths():
    assert lengths_to_try([1, 9000], 16, 64, 200) == [
        *(1, 15, 16, 17, 31, 32, 33, 63, 64, 79, 80, 81, 129),
    ]
    assert 0 not in lengths_to_try([1], 1, None, 100)


def test_groups():
    one, prefix, burst = groups([1, 40, 600], 16, 9)
    assert [len(prompt) for prompt in one.prompts] == [1, 40, 600]
    assert len(prefix.prompts) == 3 and len({prompt[:48] for prompt in prefix.prompts}) == 1
    assert len(set(prefix.prompts)) == 3
    assert len(burst.prompts) == 9 and burst.at_once
    assert all(
        token in TOKENS for group in (one, prefix, burst) for p in group.prompts for token in p
    )


@pytest.mark.parametrize(
    "words, why",
    [
        ([], "--router"),
        (["--prefill", PREFILL], "--router"),
        (["--router", ROUTER, "--prefill", PREFILL, "--decode", PREFILL], "--router"),
        (["--router", ROUTER, "--lengths", "1,x"], "takes numbers and commas"),
    ],
)
def test_wrong_command_lines(words, why):
    got = CliRunner().invoke(app, ["verify", *words])
    assert got.exit_code == 2
    assert why in got.stderr


def test_a_router_that_is_not_there():
    got = CliRunner().invoke(app, ["verify", "--router", "http://127.0.0.1:9", "--json"])
    assert got.exit_code == Code.NOT_VERIFYING
    error = json.loads(got.stdout)["error"]
    assert error["name"] == "NOT_VERIFYING" and "http://127.0.0.1:9/workers" in error["text"]


def test_servers_that_want_a_key_get_it(monkeypatch):
    client, sent = httpx.AsyncClient, set()

    def answer(request: httpx.Request) -> httpx.Response:
        sent.add(request.headers.get("Authorization"))
        return httpx.Response(401)

    def made(**options) -> httpx.AsyncClient:
        return client(transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr("sglang_pd.cli.httpx.AsyncClient", made)
    CliRunner().invoke(app, ["verify", "--router", ROUTER, "--api-key", "secret"])
    assert sent == {"Bearer secret"}
