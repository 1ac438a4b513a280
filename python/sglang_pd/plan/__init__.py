"""`sglang-pd plan`: which prefill rank sends what to which decode rank, and whether that works.

sizes     how a server splits a model, from text such as `tp=4,pp=2`
model     what a model keeps of each token, from its config.json
hybrids   which of its layers are of another kind
pair      two servers of a model: what each of their ranks holds
links     who sends what to whom, by the core that the engine runs
limits    what stock engines are known to do, under which conditions
verdict   whether the pair works, stock and patched
summary   all of it, as figures
show      as tables and as JSON
picture   drawn, each server as a grid
asked     what the command line asks
"""
