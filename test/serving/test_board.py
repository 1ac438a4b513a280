"""The Grafana board and the alerts on a real Prometheus that scrapes two by two servers."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from board_picture import draw
from disconnects import disconnect_clients
from server_pairs import LOGS
from serving_scenarios import FIVE_LAYERS, NEW_TOKENS, prompts
from test_shared_fleet import DECODES, PREFILLS, make_shared_fleet, sizes

from pd_harness import cluster, prometheus
from pd_harness.polling import wait_until
from sglang_pd.dev.grafana_board import PANELS

pytestmark = [
    pytest.mark.serving,
    pytest.mark.nightly,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(prometheus.skip_reason() is not None, reason=f"{prometheus.skip_reason()}"),
]

ALERTS = cluster.CHECKOUT / "docs" / "alerts.yml"
ROUNDS, PATIENCE = 4, 120
SHOULD_BE_ZERO = "What should be zero"
VERIFY = {"SGLANG_PD_VERIFY": "1"}


@pytest.fixture(scope="module")
def scraped_fleet():
    """Two prefill and two decode servers behind a router, which have served; and Prometheus."""
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
            answers = cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE)
            assert not any(one.failure for one in answers), answers
        with ThreadPoolExecutor() as pool:
            leaving = pool.submit(
                disconnect_clients,
                (fleet.prefills["tp1"], fleet.decodes["tp2"], router),
                "router",
                seed=1,
            )
            leaving.result()
        cluster.ask(router.url, prompts(), NEW_TOKENS, PATIENCE)
        time.sleep(3 * prometheus.SCRAPE_SECONDS)
        yield store, start, time.time()


def test_every_query_of_the_board_has_series(scraped_fleet):
    store, start, end = scraped_fleet
    for panel in PANELS:
        for query in panel.queries.values():
            found = prometheus.query_range(store, prometheus.in_grafana(query), start, end)
            assert found or panel.title == SHOULD_BE_ZERO, (panel.title, query)
            if panel.title == SHOULD_BE_ZERO:
                assert not any(float(value) for one in found for _, value in one["values"]), found


def test_board_can_be_drawn(scraped_fleet):
    """docs/board.svg is this picture."""
    store, start, end = scraped_fleet

    def series_of(query: str) -> list[dict]:
        return prometheus.query_range(store, prometheus.in_grafana(query), start, end)

    picture = LOGS / "board.svg"
    draw(series_of, picture)
    text = picture.read_text()
    assert all(panel.title in text for panel in PANELS)


def test_no_alert_fires_on_servers_that_are_right(scraped_fleet):
    store, *_ = scraped_fleet
    assert prometheus.firing_alerts(store) <= {"SglangPdDecodeWaits", "SglangPdStalls"}


def test_sums_of_both_sides_agree(scraped_fleet):
    """Prefill has written what decode has compared."""
    store, *_ = scraped_fleet

    def ended(job: str) -> float:
        (one,) = prometheus.query(
            store, f'sum(sglang_pd_requests_total{{job="{job}", ended="success"}})'
        )
        return float(one["value"][1])

    assert wait_until(lambda: ended("prefill") == ended("decode"), 20, 1), (
        ended("prefill"),
        ended("decode"),
    )
