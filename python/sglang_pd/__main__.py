"""Runs `sglang-pd` as `python -m sglang_pd`."""

from sglang_pd.cli import main

if __name__ == "__main__":
    main()
