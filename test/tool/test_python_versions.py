"""The tool and the engine-free core on Pythons other than 3.11, if they are installed."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.13")  # the oldest and the newest; the engine's environments have 3.11
# Of the two test suites; the tool's own are in pyproject.toml.
TEST_PACKAGES = (
    "hypothesis",
    "matplotlib",
    "numpy",
    "psutil",
    "pytest",
    "pytest-timeout",
    "hatchling",
)
SUITES = ("test/unit", "test/tool")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )


def path_with_pyenv() -> str:
    """PATH with pyenv's Pythons, but not its shims, which fail for versions not selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = [folder for folder in os.environ["PATH"].split(":") if Path(folder) != pyenv / "shims"]
    return ":".join([*kept, *map(str, sorted(pyenv.glob("versions/*/bin")))])


@pytest.mark.parametrize("version", VERSIONS)
def test_unit_and_tool_tests_pass_on_other_pythons(version, tmp_path):
    uv = ROOT / ".pd-env" / "base" / "bin" / "uv"
    if not uv.exists():
        pytest.skip("uv comes with scripts/setup.sh, which has not made this environment")
    never = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "PATH": path_with_pyenv()}
    found = run(uv, "python", "find", version, env=never)
    if found.returncode != 0:
        pytest.skip(f"no Python {version} here: {found.stderr.strip()}")
    python = tmp_path / "venv" / "bin" / "python"
    made = run(uv, "venv", "--seed", "--python", found.stdout.strip(), python.parents[1], env=never)
    assert made.returncode == 0, made.stderr
    given = ("-r", ROOT / "pyproject.toml", *TEST_PACKAGES)
    brought = run(uv, "pip", "install", "--python", python, *given, env=never)
    assert brought.returncode == 0, brought.stderr
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    done = run(
        *(python, "-m", "pytest", "-q", "-m", "not engine and not nightly"),
        *("-p", "no:cacheprovider", *SUITES),
        cwd=ROOT,
        env={**clean, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
