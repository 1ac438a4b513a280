"""A real Prometheus that scrapes a fleet's servers."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from pd_harness.cluster import HOST, Server
from pd_harness.ports import free_ports

PROGRAM = "prometheus"  # and `promtool`; both are in Debian's package
SCRAPE_SECONDS = 2  # also the limit for an answer, on a busy machine
RATE_INTERVAL = "10s"  # Grafana's `$__rate_interval` is at least four scrapes
QUERY_SECONDS = 30


def skip_reason() -> str | None:
    """Why no Prometheus can be started; None if one can."""
    return None if shutil.which(PROGRAM) else "no Prometheus: apt-get install prometheus"


def prometheus(jobs: Mapping[str, Sequence[Server]], rules: Path, logs: Path) -> Server:
    """Returns a Prometheus, which starts when the servers are ready.

    Args:
        jobs: The servers to scrape, by the job that labels their series.
        rules: A file of alerts.
        logs: A folder for its log, its configuration and its data, which are removed first.
    """
    (port,) = free_ports(1)
    shutil.rmtree(data := logs / "prometheus", ignore_errors=True)
    data.mkdir(parents=True)
    scraped = [
        {
            "job_name": job,
            "static_configs": [{"targets": [f"{HOST}:{one.port}" for one in servers]}],
        }
        for job, servers in jobs.items()
    ]
    seconds = f"{SCRAPE_SECONDS}s"
    config = data / "config.yml"  # JSON is YAML
    intervals = {"scrape_interval": seconds, "evaluation_interval": seconds}
    config.write_text(
        json.dumps({"global": intervals, "scrape_configs": scraped, "rule_files": [str(rules)]})
    )
    command = [PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={data / 'series'}"]
    command += [f"--web.listen-address={HOST}:{port}"]
    log = logs / "prometheus.log"
    return Server(PROGRAM, command, port, log, ready_path="/-/ready", needs_others=True)


def in_grafana(expression: str) -> str:
    """Returns a query of the board as Grafana sends it, for all jobs."""
    return expression.replace("$__rate_interval", RATE_INTERVAL).replace("$job", ".*")


def query(server: Server, expression: str) -> list[dict]:
    """Returns each series that an expression has now: `metric`, its labels, and `value`."""
    return _query(server, "query", query=expression)


def query_range(server: Server, expression: str, start: float, end: float) -> list[dict]:
    """Returns each series between two times, in seconds since the epoch, at each scrape.

    `metric` has its labels, and `values` its times and numbers, as text.
    """
    when = {"start": start, "end": end, "step": SCRAPE_SECONDS}
    return _query(server, "query_range", query=expression, **when)


def firing_alerts(server: Server) -> set[str]:
    """Returns the names of the alerts that fire or are about to."""
    answer = httpx.get(f"{server.url}/api/v1/alerts", timeout=QUERY_SECONDS, trust_env=False)
    alerts = answer.raise_for_status().json()["data"]["alerts"]
    return {one["labels"]["alertname"] for one in alerts}


def _query(server: Server, path: str, **parameters) -> list[dict]:
    url = f"{server.url}/api/v1/{path}"
    answer = httpx.get(url, params=parameters, timeout=QUERY_SECONDS, trust_env=False)
    return answer.raise_for_status().json()["data"]["result"]
