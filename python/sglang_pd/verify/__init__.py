"""`sglang-pd verify`: requests to running servers, and what their decode ranks compared.

prompts   which requests
fleet     the servers, over HTTP
check     all of it: send, gather, judge
show      as a table, or as JSON
"""
