"""`sglang-pd verify`: sends requests to running servers, and shows what decode ranks compared.

prompts   the prompts of the requests
servers   the servers, over HTTP
check     the whole check: send, gather, judge
show      output as a table, or as JSON
"""
