"""Puts the patch set into the wheel as data of the tool; an editable install finds it in place."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        # Not as the package `sglang`: installing the wheel must not write into the engine.
        if version == "standard":
            for tree in ("sglang", "engines"):
                build_data["force_include"][f"python/{tree}"] = f"sglang_pd/data/{tree}"
        else:
            # The harness as it stands here, for the tests; `python/` must not be on the path.
            package = Path(self.directory, "pd_harness.py")
            package.parent.mkdir(parents=True, exist_ok=True)
            package.write_text(f"__path__ = [{str(Path(self.root, 'python', 'pd_harness'))!r}]\n")
            build_data["force_include_editable"][str(package)] = "pd_harness.py"
