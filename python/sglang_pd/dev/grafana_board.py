"""Prints docs/grafana.json: a board of the patch set's metrics, for Grafana 10 or later."""

import json
from dataclasses import dataclass

RANGE = "[$__rate_interval]"
JOB = 'job=~"$job"'
BYTES, COPIES = "sglang_pd_transfer_bytes_total", "sglang_pd_descriptors_total"
KV = 'kind="kv"'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        unit: As Grafana names it.
        queries: By legend, in PromQL.
    """

    title: str
    unit: str
    queries: dict[str, str]
    description: str


def rate(metric: str, *by: str, only: str = "") -> str:
    """Returns the sum of a counter's rates, by these labels.

    Args:
        only: A label's value, such as `kind="kv"`.
    """
    chosen = ", ".join(filter(None, (JOB, only)))
    return f"sum by ({', '.join(by)}) (rate({metric}{{{chosen}}}{RANGE}))"


def quantile(share: float, metric: str, *by: str, only: str = "") -> str:
    """Returns a quantile of a histogram, by these labels; see `rate`."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le', *by, only=only)})"


def total(metric: str, *by: str) -> str:
    """Returns the sum of a gauge, by these labels."""
    return f"sum by ({', '.join(by)}) ({metric}{{{JOB}}})"


PANELS = (
    Panel(
        "Requests",
        "reqps",
        {"{{side}} {{ended}}": rate("sglang_pd_requests_total", "side", "ended")},
        "Requests that ended, counted once for each server.",
    ),
    Panel(
        "Failures by reason",
        "reqps",
        {"{{side}} {{reason}}": rate("sglang_pd_failures_total", "side", "reason")},
        "Counted on each rank that knows why; docs/operate.md says what to do.",
    ),
    Panel(
        "Failures by peer",
        "reqps",
        {"{{side}} with {{peer}}": rate("sglang_pd_failures_total", "side", "peer")},
        "One peer alone: look there. All peers: look here.",
    ),
    Panel(
        "Bytes to each decode server",
        "Bps",
        {"{{peer}}": rate(BYTES, "peer")},
        "What all ranks gave to the transport.",
    ),
    Panel(
        "Bytes by path",
        "Bps",
        {"{{kind}} {{path}}": rate(BYTES, "kind", "path")},
        "whole: pages. packed: KV heads as rows. slices: token by token. engine: its own code.",
    ),
    Panel(
        "KV bytes per copy",
        "bytes",
        {"{{path}}": f"{rate(BYTES, 'path', only=KV)} / {rate(COPIES, 'path', only=KV)}"},
        "The smaller, the more a transport's cost for each copy counts.",
    ),
    Panel(
        "Transfer time of KV",
        "s",
        {
            f"p{percent} {{{{backend}}}} {{{{path}}}}": quantile(
                percent / 100, "sglang_pd_transfer_seconds", "backend", "path", only=KV
            )
            for percent in (50, 99)
        },
        "From giving copies to the transport until they are written.",
    ),
    Panel(
        "Requests by state",
        "short",
        {"{{side}} {{state}}": total("sglang_pd_rooms", "side", "state")},
        "Prefill bootstrapping: waits for decode. Decode waiting: waits for prefill.",
    ),
    Panel(
        "Time in each state, p99",
        "s",
        {"{{side}} {{state}}": quantile(0.99, "sglang_pd_room_seconds", "side", "state")},
        "Where a request's time goes between the two servers.",
    ),
    Panel(
        "Servers known",
        "short",
        {"{{side}} knows {{kind}}": total("sglang_pd_peers", "side", "kind")},
        "refused: cannot work together, see the log. silent: does not answer.",
    ),
    Panel(
        "Scheduler held up by KV transfer",
        "s",
        {"{{side}} {{where}}": rate("sglang_pd_stall_seconds_total", "side", "where")},
        "Seconds per second in polls of over 50 ms; other requests wait meanwhile.",
    ),
    Panel(
        "What should be zero",
        "cps",
        {
            "mismatches with {{peer}}": rate("sglang_pd_verified_mismatches_total", "peer"),
            "malformed messages on {{side}}": rate("sglang_pd_malformed_messages_total", "side"),
            "lost events on {{side}}": rate("sglang_pd_lost_events_total", "side"),
        },
        "With SGLANG_PD_VERIFY, KV that differs; messages that cannot be read; events not counted.",
    ),
)


def board() -> dict:
    """Returns the board as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": panel.title,
            "description": panel.description,
            "datasource": source,
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "gridPos": {
                "x": number % COLUMNS * WIDTH,
                "y": number // COLUMNS * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            },
            "targets": [
                {"refId": chr(65 + i), "expr": query, "legendFormat": legend, "datasource": source}
                for i, (legend, query) in enumerate(panel.queries.items())
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    jobs = "label_values(sglang_pd_rooms, job)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        {
            "name": "job",
            "type": "query",
            "datasource": source,
            "query": jobs,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    return {
        "title": "SGLang PD: KV transfers",
        "uid": "sglang-pd",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(board(), indent=1))
