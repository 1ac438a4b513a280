"""Puts the patch set into the wheel as data of the tool; an editable install finds it in place."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        # Not as the package `sglang`: installing the wheel must not write into the engine.
        if version == "standard":
            for tree in ("sglang", "engines"):
                build_data["force_include"][f"python/{tree}"] = f"sglang_pd/data/{tree}"
