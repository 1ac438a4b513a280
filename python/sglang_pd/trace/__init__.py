"""`sglang-pd trace`: how each request went on both servers, from the lines that they write.

requests   reads the lines, and joins those of one request
show       output as a table, as one request's time, or as JSON
picture    one request's time as a picture
"""
