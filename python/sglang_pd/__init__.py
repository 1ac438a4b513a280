"""`sglang-pd`: applies the prefill/decode patch set to an SGLang engine, and reverts it."""

__version__ = "0.2.0"
