"""The options of `sglang-pd plan`, without the sizes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.patchset.patches import public_version, supported_releases
from sglang_pd.plan.model import Model, read_model
from sglang_pd.plan.pair import make_pair
from sglang_pd.plan.sizes import parse_sizes
from sglang_pd.plan.summary import Summary


@dataclass(frozen=True)
class PlanRequest:
    """A model's path, and options as `sglang-pd plan --help` describes them."""

    path: Path
    backend: str
    release: str
    page: int = 0
    draft: int = 0
    fia: bool = False

    @cached_property
    def model(self) -> Model:
        """The model. Raises Refusal UNSUPPORTED for an unknown release, else as `read_model`."""
        if public_version(self.release) not in supported_releases():
            raise Refusal(
                ExitCode.UNSUPPORTED,
                f"SGLang {self.release} is not supported; this patch set supports "
                f"{', '.join(supported_releases())}: pass one of these as --release",
            )
        return read_model(self.path, public_version(self.release))

    def summary(self, prefill: str, decode: str) -> Summary:
        """Summarizes a pair of these sizes. Raises ValueError if no server starts with them."""
        model = self.model
        sides = [parse_sizes(text, self.draft, self.page) for text in (prefill, decode)]
        return Summary(
            make_pair(model, *sides, self.backend, public_version(self.release), self.fia)
        )
