"""The command line: exit codes, JSON and text."""

import json
import subprocess
import sys

import pytest
import typer
from toy import VERSION, Toy, write
from typer.testing import CliRunner

from sglang_pd import __version__
from sglang_pd.cli import app
from sglang_pd.dev.fingerprints import main
from sglang_pd.errors import ExitCode
from sglang_pd.patchset import patches

runner = CliRunner()


@pytest.fixture
def status_json(call):
    """A function that returns what `status` prints as JSON."""
    return lambda *patch: json.loads(call("status", *patch, "--json")[1])


@pytest.fixture
def patches_without_edits(toy):
    """A patch that the release carries, one that it needs in part, and one of another release."""
    for name, releases in {
        "own": f'[releases."{VERSION}"]\nstate = "carried"\nwhat = "all"\n',
        "left": f'[releases]\n"{VERSION}" = {{ state = "in part", what = "half" }}\n',
        "other": '[releases]\n"1.0" = "needed"\n',
    }.items():
        toy.write_patch(name, releases)


def test_status_apply_and_revert_round_trip(call, toy):
    code, text, _ = call("status")
    assert (code, str(toy.root) in text, "absent" in text) == (ExitCode.ABSENT, True, True)
    code, text, _ = call("apply", "--dry-run")
    assert (code, "would be applied" in text, "srt/net/plan.py" in text) == (0, True, True)
    code, text, _ = call("apply")
    assert (code, f"2 patches applied to SGLang {VERSION}" in text) == (0, True)
    code, text, _ = call("apply")
    assert (code, "already applied" in text) == (0, True)
    assert call("status")[0] == 0
    assert call("diff")[1].startswith("diff --git a/sglang/srt/layout/__init__.py")
    code, text, _ = call("revert")
    assert (code, "restored" in text) == (0, True)
    code, text, _ = call("revert")
    assert (code, "nothing to revert" in text) == (0, True)


def test_status_as_json(call, toy):
    code, text, _ = call("status", "--json")
    shown = json.loads(text)
    assert code == ExitCode.ABSENT
    assert shown["tool"] == __version__
    assert shown["engine"] == {"path": str(toy.root), "version": VERSION, "release": VERSION}
    assert shown["state"] == "absent"
    assert shown["edited"] == shown["drifts"] == shown["notes"] == []
    net, pools = shown["patches"]
    assert net == {
        "id": "net",
        "title": "title of net",
        "kind": "mission",
        "upstream": "none",
        "need": "needed",
        "what": "",
        "state": "absent",
        "symbols": {"srt/net/conn.py::send": "absent", "srt/net/plan.py": "absent"},
    }
    assert set(pools["symbols"]) == {
        *("srt/pool.py::Pool.nbytes", "srt/pool.py::Pool.width", "srt/pool.py::TABLE"),
        *("srt/layout/__init__.py", "srt/layout/deep/more.py"),
    }


def test_status_lists_carried_and_missing_patches(call, status_json, patches_without_edits):
    shown = status_json()
    assert [patch["id"] for patch in shown["patches"]] == ["net", "pools"]
    rest = {"upstream": "none", "title": "title of own", "kind": "mission"}
    assert shown["carried"] == [{"id": "own", "need": "carried", "what": "all", **rest}]
    rest["title"] = "title of left"
    assert shown["missing"] == [{"id": "left", "need": "in part", "what": "half", **rest}]
    code, text, _ = call("status")
    rows = {row.split()[0]: row for row in text.splitlines()[3:]}
    assert (code, list(rows)) == (ExitCode.ABSENT, ["left", "net", "own", "pools"])
    assert f"carried by SGLang {VERSION}" in rows["own"] and "title of own" in rows["own"]
    assert "in part, no edit yet" in rows["left"]
    assert "2 patches applied" in call("apply")[1]
    assert call("status")[0] == 0


def test_status_uses_record_order(call, status_json, toy):
    needed = f'[releases."{VERSION}"]\nstate = "in part"\nwhat = "half"\n'
    for name, kind, order in (("a", "hardening", 1), ("b", "mission", 9), ("c", "layouts", 5)):
        toy.write_patch(name, needed, kind, order)
    _, text, _ = call("status")
    rows = [row.split("  ")[1].split()[0] for row in text.splitlines() if row.startswith("  ")]
    assert rows == ["net", "pools", "b", "c", "a"]
    headings = [row.strip() for row in text.splitlines() if row.rstrip().endswith(":")]
    assert headings == ["main purpose:", "other layouts:", "hardening:"]
    assert [patch["id"] for patch in status_json()["missing"]] == ["b", "c", "a"]


def test_status_of_one_patch(call, status_json):
    code, text, _ = call("status", "net")
    assert code == ExitCode.ABSENT
    for said in ("title of net", "symptom of net", "cause of net", "drop_when of net"):
        assert said in text
    assert "change of net" in text and "srt/net/conn.py::send" in text
    assert "pools" not in text and "srt/pool.py" not in text
    shown = status_json("net")
    assert (shown["id"], shown["state"], shown["cause"]) == ("net", "absent", "cause of net")
    assert shown["symbols"] == {"srt/net/conn.py::send": "absent", "srt/net/plan.py": "absent"}
    assert shown["releases"][VERSION]["change"] == "change of net"
    call("apply")
    assert (call("status", "net")[0], call("status", "pools")[0]) == (0, 0)


def test_status_of_patch_without_edits(call, patches_without_edits):
    call("apply")
    for name, expected, state in (
        ("own", 0, "carried"),
        ("left", ExitCode.ABSENT, "missing"),
        ("other", ExitCode.ABSENT, "unknown"),
    ):
        code, text, _ = call("status", name, "--json")
        shown = json.loads(text)
        assert (code, shown["state"], shown["symbols"]) == (expected, state, {})
    _, text, _ = call("status", "other")
    assert f"SGLang {VERSION}: not examined" in text and "other releases: 1.0 needed" in text


def test_status_of_unknown_patch_is_refused(call):
    code, _, err = call("status", "nett")
    assert (code, "'nett'" in err, "net, pools" in err) == (2, True, True)


def test_version_option_prints_version(call):
    assert call("--version", engine=None)[:2] == (0, f"sglang-pd {__version__}\n")


def test_preview_release_needs_preview_option(call, status_json, toy):
    why = "nothing of it has run"
    write(toy.releases / VERSION / "release.toml", f'trees = ["sglang"]\npreview = "{why}"\n')
    before = toy.snapshot()
    for words in (["apply"], ["apply", "--dry-run"], ["apply", "--release", VERSION]):
        code, _, err = call(*words)
        assert (code, why in err, "--preview" in err) == (ExitCode.PREVIEW, True, True)
    said = f"SGLang {VERSION} is a preview: {why}"
    code, text, _ = call("status")
    assert (code, said in text) == (ExitCode.ABSENT, True)
    shown = status_json()
    assert (shown["preview"], shown["notes"]) == (why, [said])
    code, text, err = call("diff")
    assert (code, text.startswith("diff --git"), err) == (0, True, said + "\n")
    assert call("apply", "--preview", "--dry-run")[0] == 0
    assert toy.snapshot() == before
    code, text, _ = call("apply", "--preview")
    assert (code, said in text, "2 patches applied" in text) == (0, True, True)
    assert call("status")[0] == 0
    assert call("revert")[0] == 0
    assert toy.snapshot() == before


def test_stable_release_has_no_preview_note(call, status_json):
    assert status_json()["preview"] is None
    assert call("apply", "--preview")[0] == 0


def test_matched_version_is_reported(call, status_json, toy):
    write(toy.root / "version.py", f"__version__ = '{VERSION}.post3'\n")
    said = (
        f"the engine's version ({VERSION}.post3) is unknown; all patched symbols match "
        f"SGLang {VERSION}"
    )
    shown = status_json()
    engine = {"path": str(toy.root), "version": f"{VERSION}.post3", "release": VERSION}
    assert shown["engine"] == engine
    assert shown["notes"][0].startswith(said)
    code, text, err = call("diff")
    assert (code, text.startswith("diff --git"), err.startswith(said)) == (0, True, True)
    for words in (["apply", "--dry-run"], ["apply"], ["status"]):
        code, text, _ = call(*words)
        assert (code, said in text) == (0, True)
    assert json.loads((toy.root / ".sglang_pd/journal.json").read_text())["release"] == VERSION
    assert call("revert")[0] == 0


def test_refusals_as_text_and_json(call, tmp_path):
    code, out, err = call("status", engine=tmp_path)
    assert (code, out, "refused: no SGLang at" in err) == (ExitCode.NO_ENGINE, "", True)
    code, out, err = call("status", "--json", engine=tmp_path)
    assert (code, err) == (ExitCode.NO_ENGINE, "")
    error = json.loads(out)["error"]
    assert (error["code"], error["name"]) == (ExitCode.NO_ENGINE, "NO_ENGINE")


def test_exit_codes_of_drifted_and_half_applied(call, toy):
    write(toy.root / "srt/net/plan.py", "THEIRS = 1\n")
    assert call("status")[0] == call("apply")[0] == ExitCode.DRIFTED
    (toy.root / "srt/net/plan.py").unlink()
    call("apply")
    (toy.root / "srt/net/plan.py").unlink()
    code, text, _ = call("status")
    assert (code, "half-applied" in text) == (ExitCode.HALF_APPLIED, True)


def test_revert_works_on_unsupported_release(call, toy):
    call("apply")
    other = (toy.releases / VERSION).rename(toy.releases / "5.0")
    toy.pin(other, "srt/net/conn.py", "send", "0" * 64)
    assert call("status")[0] == ExitCode.UNSUPPORTED
    assert call("revert")[0] == 0


def test_help_lists_all_commands():
    command = [sys.executable, "-m", "sglang_pd", "--help"]
    ran = subprocess.run(command, cwd=patches.PACKAGE.parent, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert commands == [
        *("status", "apply", "revert", "diff", "export"),
        *("doctor", "verify", "plan", "trace"),
    ]
    for command in commands:
        assert command in ran.stdout


# Fingerprints


@pytest.fixture
def run_fingerprints(toy, toy_patch_set):
    """A function that runs the developers' command on the toy; returns exit code and stderr."""
    developers = typer.Typer()
    developers.command()(main)

    def run():
        got = runner.invoke(developers, ["--engine", str(toy.site), "--release", VERSION])
        return got.exit_code, got.stderr

    return run


def test_fingerprints_are_written(toy, run_fingerprints):
    file = toy.releases / VERSION / "fingerprints.json"
    before = json.loads(file.read_text())
    file.unlink()
    assert run_fingerprints() == (0, "")
    assert json.loads(file.read_text()) == before
    assert before["srt/net/plan.py"] is None
    assert before["srt/pool.py"]["TABLE"] is None
    assert len(before["srt/pool.py"]["Pool.nbytes"]) == 64


SETTER = "class Pool:\n    @property\n    def pages(self): ...\n"
SETTER += "    @pages.setter\n    def pages(self, n): ...\n"


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("stray.py", "A = 1\n", "srt/stray.py is not in any patch record"),
        ("net/plan.py", None, "patch net names srt/net/plan.py, which the tree lacks"),
        (
            "net/conn.py",
            "def send(x):\n    return x\n",
            "srt/net/conn.py::send is identical to the engine's",
        ),
        ("net/conn.py", "class send:\n    x = 1\n", "`send` is a function"),
        ("pool.py", SETTER, "our srt/pool.py defines `Pool.pages` twice"),
    ],
)
def test_fingerprints_refuse_inconsistent_patch_set(toy, run_fingerprints, path, text, words):
    file, written = toy.trees / "sglang/srt" / path, toy.releases / VERSION / "fingerprints.json"
    file.unlink() if text is None else write(file, text)
    before = written.read_text()
    code, text = run_fingerprints()
    assert (code, words in text) == (ExitCode.PATCH_SET, True), text
    assert written.read_text() == before


TESTS_WITHOUT_CHANGE = '[releases."1.0"]\nstate = "needed"\ntests = ["fails"]\n'
NAMES_WITHOUT_CHANGE = '[releases."1.0"]\nstate = "needed"\nnames = ["gone"]\n'


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("patches/net.toml", lambda text: text + "tittle = 1\n", "unknown field `tittle`"),
        ("patches/net.toml", lambda text: "tittle = 1\n" + text, "unknown field `tittle`"),
        ("patches/net.toml", lambda text: text.replace("title =", "#"), "required field `title`"),
        ("patches/net.toml", lambda text: text.replace("needed", "nedeed"), "'nedeed'"),
        ("patches/net.toml", lambda text: text.replace("needed", "carried"), "a carried patch"),
        ("patches/net.toml", lambda text: text.replace("change =", "what ="), "give both"),
        ("patches/net.toml", lambda text: text.replace("symbols =", "names ="), "give both"),
        ("patches/net.toml", lambda text: text + NAMES_WITHOUT_CHANGE, "`names` requires"),
        ("patches/net.toml", lambda text: text + TESTS_WITHOUT_CHANGE, "`tests` requires"),
        ("patches/net.toml", lambda text: f"{text}[releases.'{VERSION}']\n", "net.toml"),
        (f"{VERSION}/release.toml", lambda text: text.replace('["sglang"]', '"a"'), "$.trees"),
        (f"{VERSION}/release.toml", lambda text: text.replace("]", ""), "release.toml"),
        (f"{VERSION}/fingerprints.json", lambda text: text.replace("null", "7"), "got `int`"),
        (f"{VERSION}/fingerprints.json", lambda text: text[:-3], "truncated"),
    ],
)
def test_invalid_patch_set_file_is_named(toy, path, change, words):
    file = toy.releases / path
    file.write_text(change(file.read_text()))
    toy.assert_refused(Toy.release, ExitCode.PATCH_SET, str(file), words)


def test_record_owns_only_symbols_of_its_releases(toy, run_fingerprints):
    file = toy.releases / "patches" / "net.toml"
    file.write_text(file.read_text().replace(f'"{VERSION}"', '"1.0"'))
    code, text = run_fingerprints()
    assert code == ExitCode.PATCH_SET
    assert "srt/net/conn.py::send is not in any patch record" in text


def test_fingerprints_require_unmodified_engine(toy, run_fingerprints):
    conn = toy.root / "srt/net/conn.py"
    conn.write_text(conn.read_text() + "# edited\n")
    code, text = run_fingerprints()
    assert (code, "edited since installation" in text) == (ExitCode.EDITED, True)


def test_constant_equal_to_engine_is_not_patched(toy, call, status_json):
    ours = toy.trees / "sglang/srt/pool.py"
    write(ours, ours.read_text() + "SIZE = 4\n")
    write(toy.trees / "sglang/srt/net/other.py", "UNTOUCHED = True\n")
    toy.make_fingerprints()
    symbols = [symbol for patch in status_json()["patches"] for symbol in patch["symbols"]]
    assert "srt/pool.py::SIZE" not in symbols
    code, text, _ = call("apply")
    assert (code, "other.py" in text) == (0, False)
    assert call("status")[0] == 0
