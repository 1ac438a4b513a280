"""Commands for developers; nothing of the tool imports them.

fingerprints    `python -m sglang_pd.dev.fingerprints`: makes a release's fingerprints
patches_page    `python -m sglang_pd.dev.patches_page`: prints docs/patches.md
memfabric_page  `python -m sglang_pd.dev.memfabric_page`: prints docs/memfabric.md
"""


def table_row(cells: list[str]) -> str:
    """Formats a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
