"""The Grafana board and the alerts on a real Prometheus that scrapes two by two servers."""

import time

import pytest
from board_picture import draw
from disconnects import disconnect_clients
from engine_release import SINCE_0_5_18, shown_by_0_5_23
from server_pairs import LOGS
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, prompts
from test_shared_fleet import DECODES, PREFILLS, make_shared_fleet, sizes

from pd_harness import cluster, prometheus
from pd_harness.device import device
from pd_harness.polling import wait_until
from sglang_pd.dev.grafana_board import PANELS

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.alone,
    shown_by_0_5_23,
    pytest.mark.timeout(900),
    pytest.mark.skipif(device() != "cpu", reason="four servers, on one machine's cores"),
    pytest.mark.skipif(prometheus.skip_reason() is not None, reason=f"{prometheus.skip_reason()}"),
]

ALERTS = cluster.CHECKOUT / "docs" / "alerts.yml"
ROUNDS, PATIENCE = 4, 120
SETTLE_SECONDS = 90  # for metrics to say so
SHOULD_BE_ZERO = "What should be zero"
# 0.5.9 with metrics does not notice that clients have left, so that nothing fails there.
FAILURES = () if SINCE_0_5_18 else ("Failures by reason", "Failures by peer")
# Two cores are busy with four servers and 200 clients.
ALERTS_OF_LOAD = {"SglangPdDecodeWaits", "SglangPdPrefillWaits", "SglangPdStalls"}
VERIFY = {"SGLANG_PD_VERIFY": "1"}
SIDES = ("prefill", "decode")


@pytest.fixture(scope="module")
def scraped_fleet():
    """Two prefill and two decode servers, which have served, and a Prometheus.

    Yields Prometheus, the servers' router, and when they began and ended to serve, in seconds since
    the epoch.
    """
    both = ("tp1", "tp2")
    fleet = make_shared_fleet(
        "metrics-two-and-two",
        FIVE_LAYERS,
        sizes("nixl", **{size: PREFILLS[size] for size in both}),
        sizes("nixl", **{size: DECODES[size] for size in both}),
        metrics=True,
        **VERIFY,
    )
    jobs = {"prefill": [*fleet.prefills.values()], "decode": [*fleet.decodes.values()]}
    folder = LOGS / fleet.name
    router = cluster.router(*jobs.values(), folder, "everyone")
    store = prometheus.prometheus(jobs, ALERTS, folder)
    with cluster.running([*fleet.servers, router, store]):
        start = time.time()
        for _ in range(ROUNDS):
            ask(router)
        servers = (fleet.prefills["tp1"], fleet.decodes["tp2"], router)
        disconnect_clients(servers, "router", seed=1)
        ask(router)
        time.sleep(3 * prometheus.SCRAPE_SECONDS)
        yield store, router, start, time.time()


def ask(router: cluster.Server) -> None:
    answers = cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE)
    assert not any(one.failure for one in answers), answers


def test_every_query_of_the_board_has_series(scraped_fleet):
    store, _, start, end = scraped_fleet
    for panel in PANELS:
        for query in panel.queries.values():
            found = prometheus.query_range(store, prometheus.in_grafana(query), start, end)
            assert found or panel.title in (SHOULD_BE_ZERO, *FAILURES), (panel.title, query)
            if panel.title == SHOULD_BE_ZERO:
                assert not any(float(value) for one in found for _, value in one["values"]), found


def test_board_can_be_drawn(scraped_fleet):
    """For docs/board.svg, a copy of this picture."""
    store, _, start, end = scraped_fleet

    def series_of(query: str) -> list[dict]:
        return prometheus.query_range(store, prometheus.in_grafana(query), start, end)

    picture = LOGS / "board.svg"
    draw(series_of, picture)
    text = picture.read_text()
    assert all(panel.title in text for panel in PANELS)


def test_no_alert_fires_on_servers_that_are_right(scraped_fleet):
    store, *_ = scraped_fleet
    assert prometheus.firing_alerts(store) <= ALERTS_OF_LOAD


def test_each_side_counts_each_request_once(scraped_fleet):
    """Whatever TP size the servers have to which the router sends them."""
    store, router, *_ = scraped_fleet

    def totals(metric: str, only: str = "") -> list[float]:
        found = (prometheus.query(store, f'sum({metric}{{job="{job}"{only}}})') for job in SIDES)
        return [float(one["value"][1]) for (one,) in found]

    def ended() -> list[float]:
        return totals("sglang_pd_requests_total", ', ended="success"')

    def is_idle() -> bool:
        return not any(totals("sglang_pd_rooms"))

    assert wait_until(is_idle, SETTLE_SECONDS, 1)
    time.sleep(2 * prometheus.SCRAPE_SECONDS)
    expected = [before + len(prompts()) for before in ended()]
    ask(router)
    assert wait_until(lambda: ended() == expected, SETTLE_SECONDS, 1), (ended(), expected)
