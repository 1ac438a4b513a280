"""The docs are correct: commands work, links resolve, and log lines exist."""

import re

import pytest
import typer
from doc_commands import DOCKERFILES, PAGES, ROOT, commands, dockerfile_commands, page_commands
from toy import VERSION, WHEEL_SOURCES, install_package, write

from sglang_pd import __version__
from sglang_pd.cli import app
from sglang_pd.doctor import environment, memfabric, ports
from sglang_pd.doctor.host import Host, LaunchOptions
from sglang_pd.doctor.system import MIN_OPEN_FILES
from sglang_pd.errors import ExitCode

TOOL_COMMANDS = commands("sglang-pd")
ROUTER_COMMANDS = commands("python", "-m", "sglang_router.launch_router")


@pytest.mark.parametrize("command", TOOL_COMMANDS, ids=str)
def test_tool_accepts_documented_commands(command):
    """Only parses the command; `...` stands for further options."""
    words = [word for word in command.words[1:] if word != "..."]
    if words[-1:] == ["--url"]:
        words.append("http://host")
    group = typer.main.get_command(app)
    if words == ["--version"]:
        return
    name, found, rest = group.resolve_command(typer.Context(group), words)
    assert name == words[0]
    found.make_context(name, rest)


@pytest.mark.parametrize("command", ROUTER_COMMANDS, ids=str)
def test_router_accepts_documented_commands(command):
    router = pytest.importorskip("sglang_router.launch_router", reason="no router here")
    args = router.parse_router_args(list(command.words[3:]))
    assert args.pd_disaggregation and len(args.prefill_urls) == 1 and args.decode_urls


def test_docs_contain_commands():
    assert len(TOOL_COMMANDS) > 30 and len(ROUTER_COMMANDS) >= 2
    assert len(commands("python", "-m", "sglang.launch_server")) > 10


# On a toy engine


@pytest.fixture
def run_documented(toy, call, monkeypatch, tmp_path):
    """A function that runs a command on a toy with NIXL and Ascend; returns code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(toy.site / "cann"))
    write(toy.site / "cann/compiler/version.info", "Version=8.5.0\n")
    for name in ("torch", "torch_npu", "nixl", "memfabric_hybrid"):
        install_package(toy.site, name, "1.0")

    def run(words):
        code, out, err = call(*words, engine=None if words[0] == "--version" else toy.site)
        return code, out + err

    return run


def runs_on_toy(command) -> bool:
    """Whether the command needs neither servers nor a certain host."""
    words = command.words
    return (
        words[0] == "sglang-pd"
        and words[1] != "verify"
        and (words[1] != "doctor" or "--image" in words)
    )


def test_install_page_commands_work(run_documented, toy):
    toy.write_patch("npu-cpu-copy", f'[releases]\n"{VERSION}" = "needed"\n')
    before = toy.snapshot()
    printed = []
    for command in filter(runs_on_toy, page_commands(ROOT / "docs/install.md")):
        code, text = run_documented(command.words[1:])
        assert code == command.code, (str(command), text)
        printed.append(text)
    assert printed[0] == f"sglang-pd {__version__}\n"
    assert any("would be applied" in text for text in printed)
    assert toy.snapshot() == before


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_image_build_fails_without_apply(run_documented, file):
    """All steps of the build succeed; without `apply` the last one fails."""
    steps = [one.words[1:] for one in dockerfile_commands(file) if one.words[0] == "sglang-pd"]
    assert [words[0] for words in steps] == ["apply", "doctor"]
    assert run_documented(steps[1])[0] == ExitCode.HOST_PROBLEM
    assert [run_documented(words)[0] for words in steps] == [0, 0]


def test_dockerfiles_copy_all_wheel_sources():
    """No other files are sent to a builder: the checkout's environments have gigabytes."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert [line for line in ignored if line[0] not in "#!"][0] == "*"
    for file in DOCKERFILES:
        copied = re.findall(r"(?m)^COPY (.+) \S+$", file.read_text())
        names = " ".join(copied).split()
        assert set(names) == sent == WHEEL_SOURCES
        assert all((ROOT / name).exists() for name in names)


def test_documented_ulimits_satisfy_doctor():
    runs = [
        one for one in page_commands(ROOT / "docs/install.md") if one.words[:2] == ("docker", "run")
    ]
    assert len(runs) == 2
    for one in runs:
        limits = [value for name, value in zip(one.words, one.words[1:]) if name == "--ulimit"]
        assert set(limits) == {"memlock=-1", f"nofile={MIN_OPEN_FILES}"}, str(one)


def test_rollback_of_upgrade_page_works(call, toy):
    before = toy.snapshot()
    toy.apply()
    back = (ROOT / "docs/upgrade.md").read_text().split("## Back")[1]
    assert call("revert")[0] == 0 and "sglang-pd revert" in back
    assert call("status")[0] == ExitCode.ABSENT and "exit code 10: absent" in back
    assert toy.snapshot() == before


# Links, log lines, outputs and exit codes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_documented_log_lines_exist_in_sources():
    """A source may split a message into strings anywhere."""
    table = (ROOT / "docs/trouble.md").read_text().split("## Log lines that are ours")[1]
    lines = re.findall(r"(?m)^\| `([^`]+)` \|", table.split("## ")[0])
    assert len(lines) > 15
    sources = "".join(
        path.read_text()
        for tree in ("sglang", "engines")
        for path in (ROOT / "python" / tree).rglob("*.py")
    )
    joined = re.sub(r'"\n\s+f?"', "", sources)
    assert [line for line in lines if line not in joined] == []


def test_doctor_output_matches_install_page(tmp_path):
    """The page shows the findings on a decode host with MemFabric 1.1.6 and stock 0.5.9."""
    (shown,) = re.findall(r"(?ms)^```text\n(.*?)^```$", (ROOT / "docs/install.md").read_text())
    advice = re.findall(r"(?m)^(?:wrong|warning): .+$", shown)
    write(tmp_path / "site/m.dist-info/METADATA", "Name: memfabric_hybrid\nVersion: 1.1.6\n")
    host = Host({}, tmp_path, [str(tmp_path / "site")])
    launch = LaunchOptions("decode", "ascend", 30000, 8998, nodes=2)
    findings = [
        *memfabric.check_memfabric(host, launch, "0.5.9", False),
        *environment.check_environment(host, launch, tmp_path, False),
        *ports.check_memfabric_ports(host, launch),
    ]
    printed = [f"{one.level}: {one.name}: {one.found}: {one.advice}" for one in findings]
    assert len(advice) == 3 and set(advice) <= set(printed)
    assert {one.found for one in findings if one.name in ("memfabric", "sessions")} <= {
        part.strip() for part in re.split(r"\s{2,}|\n", shown)
    }


def test_exit_codes_are_documented():
    said = "".join(
        (ROOT / "docs" / name).read_text()
        for name in ("graft.md", "operate.md", "plan.md", "verify.md")
    )
    rows = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", said)}
    assert {int(code) for code in ExitCode} <= rows


def test_changelog_has_current_version():
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
