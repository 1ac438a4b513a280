"""`python -m sglang_pd` is the command `sglang-pd`."""

from sglang_pd.cli import main

if __name__ == "__main__":
    main()
