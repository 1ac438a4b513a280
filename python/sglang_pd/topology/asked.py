"""What `sglang-pd plan` is asked, but for the sizes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sglang_pd.errors import Code, Refusal
from sglang_pd.patchset.patches import public, supported
from sglang_pd.topology.model import Model, read_model
from sglang_pd.topology.pair import make_pair
from sglang_pd.topology.sizes import parse
from sglang_pd.topology.summary import Summary


@dataclass(frozen=True)
class Asked:
    """A model's path, and options as `sglang-pd plan --help` has them."""

    path: Path
    backend: str
    release: str
    page: int = 0
    draft: int = 0
    fia: bool = False

    @cached_property
    def model(self) -> Model:
        """Raises Refusal UNSUPPORTED for another release, NO_MODEL as `read_model`."""
        if public(self.release) not in supported():
            raise Refusal(
                Code.UNSUPPORTED,
                f"SGLang {self.release} is not supported; this patch set knows "
                f"{', '.join(supported())}: give one of them as --engine-release",
            )
        return read_model(self.path, public(self.release))

    def summary(self, prefill: str, decode: str) -> Summary:
        """Of these sizes. Raises ValueError for such as no server starts with."""
        model = self.model
        sides = [parse(text, self.draft, self.page) for text in (prefill, decode)]
        return Summary(make_pair(model, *sides, self.backend, public(self.release), self.fia))
