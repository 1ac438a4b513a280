"""`sglang-pd plan`: text, JSON and pictures, and what it refuses."""

import importlib.util
import json
import re
import subprocess
import sys
from itertools import combinations

import pytest
from hf_configs import ALL_CONFIGS
from toy import ROOT
from typer.testing import CliRunner

from sglang_pd import cli
from sglang_pd.cli import app
from sglang_pd.errors import ExitCode
from sglang_pd.plan.show import PACKING

runner = CliRunner()
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="no matplotlib: this environment is older than scripts/requirements/common.txt",
)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A function that runs the command on a model; returns exit code, stdout and stderr."""

    def run(name: str, prefill: str, decode: str, *words: str, columns: int = 80):
        file = tmp_path / name / "config.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(ALL_CONFIGS[name]))
        sizes = ("--model", str(file), "--prefill", prefill, "--decode", decode)
        for console in (cli.out, cli.err):  # a pytest worker fixes the width when it starts
            monkeypatch.setattr(console, "width", columns)
        environment = {"COLUMNS": str(columns), "TERM": "dumb"}
        got = runner.invoke(app, ["plan", *sizes, *words], env=environment)
        return got.exit_code, got.stdout, got.stderr

    return run


def unwrap(text: str) -> str:
    """Joins wrapped lines."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def test_plan_of_pair_unservable_by_stock(plan):
    """Its stages have unequal length."""
    code, text, _ = plan("qwen3", "tp=4,pp=3", "tp=2,dp=2")
    assert code == 0
    assert re.search(r"stock +wrong +the position of decode's first V buffer", text)
    assert "(mha-pp)" in text
    assert re.search(r"patched +right", text)


def test_plan_of_pair_with_equal_stages(plan):
    code, text, _ = plan("qwen3", "tp=4,pp=2", "tp=2,dp=2")
    assert code == 0
    assert "qwen3: GQA, 64 layers, 8 KV heads, bfloat16" in text
    assert re.search(r"stock +right", text) and re.search(r"patched +right", text)
    assert re.search(r"prefill +8 +1 +TP 4 PP 2 +32\+32 +2 of 8 +32,768", text)
    assert re.search(r"decode +2 +2 +TP 1 PP 1 +64 +8 of 8 +262,144", text)
    assert re.search(r"TP 2 PP 1 +TP 0 PP 0 +32-63 +4-5 +32\.0 +64 to 65,536", text)
    assert (
        "256.0 MiB over 8 pairs of ranks, in 512 copies (contiguous pages) to 524,288 copies "
        "(scattered); 24 messages" in unwrap(text)
    )


@pytest.mark.parametrize(
    "prefill, decode, page_size, copies, by",
    [
        ("tp=4", "tp=2", 16, (4 * 128, 4 * 128 * 64), "decode"),
        ("tp=2", "tp=4", 16, (4 * 128, 4 * 128 * 64), "prefill"),
        ("tp=16", "tp=4", 1, (8 * 128, 8 * 128 * 1024), "decode"),  # two ranks have each head
    ],
)
def test_plan_counts_packed_copies_beside_sliced_ones(plan, prefill, decode, page_size, copies, by):
    """A request of 1,024 tokens; 128 buffers a rank, each sliced into a copy for each token."""
    words = ("--page-size", str(page_size))
    shown = json.loads(plan("qwen3", prefill, decode, *words, "--json")[1])
    sending = [link for link in shown["links"] if link["bytes"]]
    assert shown["kv_heads"] == {"sent": "packed", "packed_by": by}
    assert {link["kv_heads"] for link in sending} == {"packed"}
    request = shown["request"]
    assert (request["copies_at_least"], request["copies_at_most"]) == copies
    assert request["copies_if_sliced"] == len(sending) * 128 * 1024
    text = unwrap(plan("qwen3", prefill, decode, *words)[1])
    assert f"KV heads go packed: {PACKING[by]}. Sliced (SGLANG_PD_PACKED=0), they take " in text
    assert f" {request['copies_if_sliced']:,} copies." in text


@pytest.mark.parametrize(
    "name, prefill, decode", [("qwen3", "tp=4", "tp=4"), ("deepseek_v3", "tp=4", "tp=2")]
)
def test_plan_of_whole_pages_mentions_no_packing(plan, name, prefill, decode):
    shown = json.loads(plan(name, prefill, decode, "--json")[1])
    assert shown["kv_heads"] == {"sent": "whole pages", "packed_by": None}
    assert shown["request"]["copies_if_sliced"] == shown["request"]["copies_at_most"]
    assert "KV heads go" not in plan(name, prefill, decode)[1]


def test_plan_reports_sliced_heads(plan):
    """As of hybrids on 0.5.23, which the engine sends its own way."""
    sizes = ("qwen3_next", "tp=2", "tp=1", "--release", "0.5.23")
    assert "KV heads go sliced: a copy for each token" in unwrap(plan(*sizes)[1])
    shown = json.loads(plan(*sizes, "--json")[1])
    assert shown["kv_heads"] == {"sent": "sliced", "packed_by": None}


SIZES = [("tp=16,pp=4", "tp=16"), ("tp=3", "tp=2"), ("tp=4,pp=2", "tp=4,pp=4")]


@pytest.mark.parametrize("prefill, decode", SIZES)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v32", "gpt_oss", "qwen3_next", "nemotron_h"])
def test_plan_output_fits_terminal_width(plan, name, prefill, decode):
    for more in ((), ("--compare", "tp=8,pp=2:tp=4,dp=2"), ("--backend", "ascend")):
        code, text, err = plan(name, prefill, decode, "--draft-layers", "1", *more)
        if code == 2:  # more stages than this model has layers
            assert "cannot be split into 4 stages" in unwrap(err)
            continue
        assert code in (0, ExitCode.INCOMPATIBLE), err
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text


def test_long_rows_are_wrapped(plan):
    _, narrow, _ = plan("qwen3", "tp=4,pp=3", "tp=1")
    _, wide, _ = plan("qwen3", "tp=4,pp=3", "tp=1", columns=200)
    (row,) = (row for row in wide.splitlines() if row.startswith("stock "))
    assert row not in narrow and all(word in narrow for word in row.split())


def test_plan_as_json(plan):
    code, text, _ = plan("deepseek_v32", "tp=2,pp=2", "tp=1", "--json", "--draft-layers", "1")
    shown = json.loads(text)
    assert (code, shown["works"]) == (0, True)
    assert (shown["stock"]["outcome"], shown["engine_release"]) == ("right", "0.5.23")
    assert shown["prefill"]["stages"] == [[0, 30], [30, 61]]
    assert (shown["decode"]["bytes_a_token"], shown["decode"]["page"]) == (62 * (1152 + 132), 64)
    ranks = [(link["prefill"], link["bytes"] > 0) for link in shown["links"]]
    assert ranks == [({"tp": tp, "pp": pp}, tp == 0) for tp in (0, 1) for pp in (0, 1)]
    last = shown["links"][1]
    sent = {(one["component"], one["draft"]): one["layers"] for one in last["sends"]}
    assert sent == {
        (name, draft): [0] if draft else list(range(30, 61))
        for name in ("kv", "index_k")
        for draft in (False, True)
    }
    assert shown["request"]["bytes"] == sum(link["bytes"] for link in shown["links"])
    assert shown["request"]["bytes"] == 62 * (1152 + 132) * 1024


def test_compare_shows_two_topologies_side_by_side(plan):
    code, text, _ = plan("qwen3", "tp=16,pp=4", "tp=16", "--compare", "tp=8:tp=4")
    assert code == 0
    assert re.search(r"tp=16,pp=4 to tp=16 +tp=8 to tp=4", text)
    assert re.search(r"stock +hangs +right", text)
    assert re.search(r"prefill ranks +64 +8 ", text)
    assert re.search(r"KV bytes per token, decode rank +32,768 +65,536", text)
    assert re.search(r"KV heads go +whole pages +packed", text)
    _, text, _ = plan("qwen3", "tp=16,pp=4", "tp=16", "--compare", "tp=8:tp=4", "--json")
    assert [one["prefill"]["ranks"] for one in json.loads(text)] == [64, 8]


@pytest.mark.parametrize(
    "name, sizes, words, says",
    [
        ("qwen3", ("tp=4", "tp=2,page=32"), (), "page size: prefill has 1, decode has 32"),
        ("qwen3", ("tp=2,pp=4", "tp=2,pp=2"), (), "PP size 2 is neither 1 nor prefill's PP size 4"),
        ("deepseek_v3", ("tp=3", "tp=2"), (), "prefill attention TP size 3 and decode attention"),
        ("falcon_h1", ("tp=2", "tp=1"), ("--release", "0.5.9"), "use the same TP size"),
        ("qwen3_next", ("pp=2", "tp=1"), (), "was not tested"),
        ("qwen3", ("tp=3", "tp=1"), (), "8 KV heads cannot be split over"),
    ],
)
def test_incompatible_pair_exits_with_reason(plan, name, sizes, words, says):
    code, text, _ = plan(name, *sizes, *words)
    assert code == ExitCode.INCOMPATIBLE and says in unwrap(text)
    code, text, _ = plan(name, *sizes, *words, "--json")
    shown = json.loads(text)
    assert code == ExitCode.INCOMPATIBLE and not shown["works"]
    assert says in "; ".join(shown["patched"]["reasons"])


@pytest.mark.parametrize(
    "sizes, words, says",
    [
        (("tp=four", "tp=1"), (), "'four' is not a number"),
        (("tp=1", "tp=1"), ("--compare", "tp=2"), "as tp=8:tp=4"),
        (("tp=1", "tp=1"), ("--fia",), "--backend ascend"),
        (("tp=1", "tp=1"), ("--picture", "plan.pdf"), ".svg or .png"),
        (("pp=2,layers=30+30", "tp=1"), (), "64 layers cannot be split into 2 stages of 30+30"),
    ],
)
def test_invalid_plan_options_are_refused(plan, sizes, words, says):
    code, _, err = plan("qwen3", *sizes, *words, columns=200)
    assert code == 2 and says in unwrap(err)


def test_unknown_release_or_model_is_refused(plan, tmp_path):
    code, _, err = plan("qwen3", "tp=1", "tp=1", "--engine-release", "0.4.0", columns=400)
    assert code == ExitCode.UNSUPPORTED and "0.5.9, 0.5.18, 0.5.23" in err
    words = ["plan", "--model", str(tmp_path / "none"), "--prefill", "tp=1", "--decode", "tp=1"]
    got = runner.invoke(app, [*words, "--json"])
    assert got.exit_code == ExitCode.NO_MODEL
    assert json.loads(got.stdout)["error"]["name"] == "NO_MODEL"


def test_missing_matplotlib_names_package_to_install(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "plan.svg"
    code, text, err = plan("qwen3", "tp=2", "tp=1", "--picture", str(file), columns=400)
    assert code == ExitCode.NO_PICTURE and "pip install 'sglang-pd[picture]'" in err
    assert not text and not file.exists()


@needs_matplotlib
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v32", "gpt_oss"])
@pytest.mark.parametrize("prefill, decode", [("tp=16,pp=4", "tp=16"), ("tp=8", "tp=4,dp=4")])
def test_text_in_pictures_does_not_overlap(plan, tmp_path, monkeypatch, name, prefill, decode):
    """All text lies inside the picture, too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plan(name, prefill, decode, "--draft-layers", "1", "--picture", str(tmp_path / "plan.png"))
    (figure,) = drawn
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    written = [*figure.texts]
    for axes in figure.axes:
        written += [*axes.texts, axes.title, *axes.get_xticklabels()]
    boxes = [
        (one.get_text(), one.get_window_extent().padded(-1)) for one in written if one.get_text()
    ]
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    for (text, box), (other_text, other) in combinations(boxes, 2):
        assert not box.overlaps(other), (text, other_text)


@needs_matplotlib
def test_pictures_are_reproducible_and_name_all_ranks(plan, tmp_path):
    """Each prefill rank is named on both sides, as text; two runs draw the same bytes."""
    for suffix, begins in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        files = [tmp_path / f"{number}.{suffix}" for number in (0, 1)]
        for file in files:
            sizes = ("tp=4,pp=2", "tp=4,dp=2")
            assert plan("qwen3", *sizes, "--picture", str(file))[0] == 0
        first, second = (file.read_bytes() for file in files)
        assert first.startswith(begins) and first == second
    words = (tmp_path / "0.svg").read_text()
    for tp in range(4):
        for stage in range(2):
            assert words.count(f">P{tp}.{stage}<") == 1 + 2  # and in decode's two groups


def test_tool_starts_without_numpy():
    """Only `plan` needs numpy; applying and reverting a patch set do not."""
    code = "import sys; sys.modules['numpy'] = None; import sglang_pd.cli"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "python", capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
